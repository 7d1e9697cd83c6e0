"""`PageStoreTests`: what every page store must do.

Subclass it in your own tests:

```python
class TestMyStore(PageStoreTests):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Iterator[StorePlace]:
        place = MyPlace(tmp_path)
        yield place
        place.close()
```

The cases only use the contract, and what they compare are bytes. A case that your store cannot pass
is overridden with `@pytest.mark.xfail(reason=...)` above it; any other override fails
`test_no_case_is_overridden`. A case that hangs fails after `case_deadline_s` with its name.
"""

from __future__ import annotations

from radixlink_testing._lifetime_cases import LifetimeCases
from radixlink_testing._opener_cases import OpenerCases
from radixlink_testing._page_cases import PageCases


class PageStoreTests(PageCases, LifetimeCases, OpenerCases):
    """The contract of `PageStore` and `StoreFactory`, case by case."""
