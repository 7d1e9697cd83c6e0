from __future__ import annotations

import copy
import inspect
import pickle

import pytest

from radixlink_contracts import OperationId, errors
from radixlink_contracts.errors import LinkError

OP = OperationId(7)

#: One of each, with every field set to something that is not its default.
EXAMPLES: list[LinkError] = [
    errors.ContractError("broken", rank=1, operation=OP),
    errors.InvalidTransitionError(
        "not now", state="queued", event="commit", story=("made", "queued"), operation=OP
    ),
    errors.StaleHandleError("released before", rank=2, operation=OP),
    errors.CapacityError("full", needed=8, available=3),
    errors.StorageError("backend", transient=True, rank=3, operation=OP),
    errors.IntegrityError("bytes", transient=True, rank=3, operation=OP),
    errors.IdentityError("another model", transient=True, rank=3, operation=OP),
    errors.BackendUnavailableError("gone", transient=True, rank=3, operation=OP),
    errors.TransferError("torn", direction="load", pages=4, rank=1, operation=OP),
    errors.TransferTimeoutError("late", direction="offload", pages=9, rank=1, operation=OP),
    errors.AgreementError("split", by_rank={0: "here", 1: "missing"}, rank=0),
]

PARENTS = {
    "ContractError": "LinkError",
    "InvalidTransitionError": "ContractError",
    "StaleHandleError": "ContractError",
    "CapacityError": "LinkError",
    "StorageError": "LinkError",
    "IntegrityError": "StorageError",
    "IdentityError": "StorageError",
    "BackendUnavailableError": "StorageError",
    "TransferError": "LinkError",
    "TransferTimeoutError": "TransferError",
    "AgreementError": "LinkError",
}


def test_the_tree_is_as_documented_and_every_error_has_an_example_here() -> None:
    public = {
        name: kind
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, LinkError) and kind is not LinkError
    }
    assert {name: kind.__bases__[0].__name__ for name, kind in public.items()} == PARENTS
    assert {type(example).__name__ for example in EXAMPLES} == set(PARENTS)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_an_error_pickles_with_all_its_fields(example: LinkError, protocol: int) -> None:
    back = pickle.loads(pickle.dumps(example, protocol))
    assert type(back) is type(example)
    assert vars(back) == vars(example)
    assert back.args == example.args == (example.message,)
    assert str(back) == example.message


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: type(e).__name__)
def test_an_example_leaves_no_field_at_its_default(example: LinkError) -> None:
    """Or the test above would not see a field that gets lost."""
    parameters = inspect.signature(type(example)).parameters.values()
    fields = vars(example)
    assert set(fields) >= {parameter.name for parameter in parameters}
    for parameter in parameters:
        assert fields[parameter.name] != parameter.default, parameter.name


def test_a_copy_is_another_error_with_the_same_fields() -> None:
    example = errors.CapacityError("full", needed=8, available=3)
    twin = copy.copy(example)
    twin.needed = 9
    assert (example.needed, twin.needed, twin.message) == (8, 9, "full")


def test_the_root_is_abstract() -> None:
    with pytest.raises(TypeError, match="raise one of its children"):
        LinkError("something")


def test_an_agreement_keeps_its_own_record_of_the_ranks() -> None:
    by_rank = {0: "here"}
    error = errors.AgreementError("split", by_rank=by_rank)
    by_rank[1] = "late"
    assert error.by_rank == {0: "here"}
