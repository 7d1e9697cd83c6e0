"""Time to first logits behind a restored prefix, with staged and with layer-wise loads.

    python tools/bench/overlap.py [--threads 1]

A model of SmolLM2-135M's shape with random weights, restored from a store in memory that takes a
while for each byte, as one behind a network does, without using this machine's processors: about
as long as computing takes. The arms take turns, and what is printed are medians of the same rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING, Final, cast

import attrs
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from radixlink_comm import SingleRank
from radixlink_contracts import LoadMode, RequestId
from radixlink_testing import InMemoryPlace, InMemoryStoreFactory
from radixlink_transformers import EngineSettings, KVGeometry, build_engine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer

    from radixlink_contracts import PageBits, PageHandles, PageKeys, PageStore, PoolLayout
    from radixlink_transformers import CausalModel, TransformersEngine

PAGE_SIZE: Final = 16
NUM_PAGES: Final = 160
VOCABULARY: Final = 4096
#: Restored, and computed behind it.
PREFIX_TOKENS: Final = 992
SUFFIX_TOKENS: Final = 128
ROUNDS: Final = 15


@attrs.frozen
class SlowStore:
    """Another store, each of whose reads takes a while."""

    store: PageStore
    places: SlowStores

    @property
    def layout(self) -> PoolLayout:
        """What its objects are."""
        return self.store.layout

    def contains(self, keys: PageKeys) -> PageBits:
        """Which pages are there."""
        return self.store.contains(keys)

    def open(self, keys: PageKeys, ttl_s: float) -> PageHandles:
        """Find pages."""
        return self.store.open(keys, ttl_s)

    def read(self, handles: PageHandles, layer_range: int, out: Buffer) -> PageBits:
        """Read one layer of some pages, late."""
        seconds = (
            len(handles.keys) * self.layout.range_bytes[layer_range] * self.places.seconds_per_byte
        )
        ready = time.perf_counter() + seconds
        good = self.store.read(handles, layer_range, out)
        time.sleep(max(0.0, ready - time.perf_counter()))
        return good

    def put(self, keys: PageKeys, parts: Sequence[Buffer]) -> PageBits:
        """Store pages."""
        return self.store.put(keys, parts)

    def close(self) -> None:
        """Close the store."""
        self.store.close()


class SlowStores:
    """Opens slow stores of one place."""

    def __init__(self) -> None:
        self._stores = InMemoryStoreFactory(place=InMemoryPlace())
        #: How long each read takes at least.
        self.seconds_per_byte = 0.0

    def open(self, layout: PoolLayout) -> PageStore:
        """Open the store of one layout."""
        return SlowStore(self._stores.open(layout), self)

    def close(self) -> None:
        """Close all."""
        self._stores.close()


@attrs.frozen(kw_only=True)
class Bench:
    """Two engines on one store, that differ in how they load."""

    stores: SlowStores
    engines: dict[LoadMode, TransformersEngine]
    prefix: tuple[int, ...]
    generator: torch.Generator = attrs.field(factory=lambda: torch.Generator().manual_seed(1))

    def tokens(self, num_tokens: int) -> tuple[int, ...]:
        """New ones."""
        drawn = torch.randint(0, VOCABULARY, (num_tokens,), generator=self.generator)
        return tuple(drawn.tolist())

    def restore(self, mode: LoadMode) -> tuple[float, float]:
        """Seconds to the first logits of a prompt whose prefix is in the store; and for the load.

        The load's are of use where it is staged.
        """
        engine = self.engines[mode]
        engine.reset()
        prompt = (*self.prefix, *self.tokens(SUFFIX_TOKENS))
        figures = engine.generate(prompt, RequestId("r"), 1).figures
        assert figures.restored_tokens == PREFIX_TOKENS, figures
        assert engine.settle(30)
        return figures.time_to_first_token_s, figures.load_s

    def compute(self) -> float:
        """Seconds to the first logits of a prompt whose prefix is on the device."""
        engine = self.engines[LoadMode.STAGED]
        prompt = (*self.prefix, *self.tokens(SUFFIX_TOKENS))
        figures = engine.generate(prompt, RequestId("r"), 1).figures
        assert figures.device_tokens == PREFIX_TOKENS, figures
        assert engine.settle(30)
        return figures.time_to_first_token_s


def model_of_smollm2s_shape() -> CausalModel:
    """Thirty layers, random weights."""
    config = AutoConfig.for_model(
        "llama",
        vocab_size=VOCABULARY,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
    )
    made = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return cast("CausalModel", made.train(mode=False))


def main() -> None:
    """Print one line for each arm."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    torch.set_num_threads(parser.parse_args().threads)
    torch.manual_seed(0)
    model, stores = model_of_smollm2s_shape(), SlowStores()
    engines = {
        mode: build_engine(
            model,
            identity_name="bench",
            revision="1",
            page_size=PAGE_SIZE,
            num_pages=NUM_PAGES,
            stores=stores,
            group=SingleRank(),
            settings=EngineSettings(load_mode=mode),
        )
        for mode in LoadMode
    }
    generator = torch.Generator().manual_seed(0)
    prefix = torch.randint(0, VOCABULARY, (PREFIX_TOKENS,), generator=generator)
    bench = Bench(stores=stores, engines=engines, prefix=tuple(prefix.tolist()))
    donor = engines[LoadMode.STAGED]
    donor.generate((*bench.prefix, 0), RequestId("donor"), 1)
    assert donor.settle(30)
    geometry = KVGeometry.of_model(model, page_size=PAGE_SIZE)
    num_bytes = PREFIX_TOKENS // PAGE_SIZE * sum(geometry.range_bytes)
    computes = [bench.compute() for _ in range(5)]
    staged, layer_wise, loads = [], [], []
    for _ in range(ROUNDS):
        # As long as computing took just now: other work on this machine comes and goes.
        stores.seconds_per_byte = statistics.median(computes[-3:]) / num_bytes
        total, load = bench.restore(LoadMode.STAGED)
        staged.append(total)
        loads.append(load)
        computes.append(bench.compute())
        layer_wise.append(bench.restore(LoadMode.LAYER_WISE)[0])
    larger = max(statistics.median(loads), statistics.median(computes))
    print(
        f"{PREFIX_TOKENS} tokens restored, {SUFFIX_TOKENS} computed; medians of {ROUNDS} rounds, "
        f"{torch.get_num_threads()} threads; share of the larger of load and compute"
    )
    arms = {"load": loads, "compute": computes, "staged": staged, "layer-wise": layer_wise}
    for name, times in arms.items():
        median = statistics.median(times)
        print(f"{name:12}{1000 * median:8.1f} ms {median / larger:6.2f}")
    for engine in engines.values():
        engine.close()
    stores.close()


if __name__ == "__main__":
    main()
