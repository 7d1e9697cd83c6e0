"""`MooncakeStoreFactory`: one connection of this process, and the stores on it."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Final

import attrs

from radixlink_contracts import StoreConfig
from radixlink_contracts.errors import BackendUnavailableError, CapacityError, StaleHandleError
from radixlink_store_mooncake._calls import Calls
from radixlink_store_mooncake._client import PageClient
from radixlink_store_mooncake._codes import Code
from radixlink_store_mooncake._engine import connect, make_client, make_replicate_config
from radixlink_store_mooncake._object import PageFormat
from radixlink_store_mooncake._process import require_no_fork
from radixlink_store_mooncake._settings import MooncakeSettings
from radixlink_store_mooncake._staging import Staging
from radixlink_store_mooncake._store import MooncakePageStore
from radixlink_store_mooncake.errors import UnansweredError

if TYPE_CHECKING:
    from radixlink_contracts import PoolLayout
    from radixlink_store_mooncake._engine import MooncakeClient


@attrs.frozen(kw_only=True, eq=False)
class _Connection:
    """What all stores of a factory share."""

    client: MooncakeClient
    pages: PageClient
    calls: Calls
    staging: Staging


class MooncakeStoreFactory:
    """Opens stores in the Mooncake of one master.

    Thread: any.
    """

    def __init__(
        self, config: StoreConfig | None = None, settings: MooncakeSettings | None = None
    ) -> None:
        """Connects to nobody yet.

        Args:
            config: `location` is "HOST:PORT" of a master, or the path of a JSON file with the
                fields of `MooncakeSettings`. `capacity_bytes` does not count: room is what the
                owners give, for all layouts together. `timeout_s` is for connecting.
            settings: In place of a location.

        Raises:
            BackendUnavailableError: The location or its settings cannot be right, or there are two;
                or a persistent tier is asked for, which is Mooncake's own.
        """
        self._config: Final = config or StoreConfig()
        location = self._config.location
        if self._config.persistent_path or self._config.persistent_bytes:
            raise BackendUnavailableError(
                f"Mooncake store: expected no persistent tier, got "
                f"{self._config.persistent_path!r} of {self._config.persistent_bytes} bytes; "
                f"Mooncake keeps pages on disks by settings of its own"
            )
        if settings is not None and location:
            raise BackendUnavailableError(
                f"Mooncake store: expected a location or settings, got both: {location!r} and "
                f"{settings}"
            )
        self._settings: Final = settings or MooncakeSettings.from_location(location)
        #: The first process that opened or closed it.
        self._process: int | None = None
        self._mutex: Final = threading.Lock()
        self._connection: _Connection | None = None
        self._stores: list[MooncakePageStore] = []
        self._closed = False

    def open(self, layout: PoolLayout) -> MooncakePageStore:
        """Open the store of one layout. The first one connects.

        Raises:
            CapacityError: A page does not fit a staging buffer.
            BackendUnavailableError: Mooncake is not installed, or no master answers; or this
                process was forked from one that has connected, or that has used this factory.
            StaleHandleError: The factory was closed.

        Owns: the caller closes it; so does the factory's close.
        """
        require_no_fork()
        process, user = os.getpid(), self._user()
        if user != process:
            raise BackendUnavailableError(
                f"Mooncake store: expected a factory of this process, got one of {user} in its "
                f"forked child {process}; make a factory in each process"
            )
        page_format = PageFormat.of(layout)
        needed, available = page_format.object_bytes, self._settings.buffer_bytes
        if needed > available:
            raise CapacityError(
                f"Mooncake store: expected a page of {layout.pool.value}, {needed} bytes with "
                f"headers, to fit a staging buffer, got buffer_bytes={available}",
                needed=needed,
                available=available,
            )
        with self._mutex:
            if self._closed:
                raise StaleHandleError("Mooncake store: expected an open factory, got a closed one")
            if self._connection is None:
                self._connection = self._connect()
            connection = self._connection
            self._require_health(connection)
            store = MooncakePageStore(
                layout,
                page_format,
                connection.pages,
                connection.staging,
                namespace=self._settings.namespace,
                whole_pages=self._settings.whole_pages,
            )
            self._stores.append(store)
        return store

    def close(self) -> None:
        """Close every store it opened, and disconnect. Idempotent.

        The pages stay, but for those in memory that this process gave. Waits for an `open` in
        progress, and then for Mooncake: about a second, and no more than `call_timeout_s`. In a
        forked child it disconnects nobody.
        """
        if self._user() != os.getpid():
            # The connection, if there is one, is kept: a child that drops it ends.
            return
        with self._mutex:
            self._closed = True
            stores, self._stores = self._stores, []
            connection, self._connection = self._connection, None
        for store in stores:
            store.close()
        if connection is not None:
            self._disconnect(connection)

    def _user(self) -> int:
        """The process that uses it: this one, unless it was forked from one that did.

        To be asked before the mutex is taken, which such a child may find held for ever by a thread
        that it does not have.
        """
        if self._process is None:
            self._process = os.getpid()
        return self._process

    def _connect(self) -> _Connection:
        """A connection, its staging registered.

        Raises:
            BackendUnavailableError: See `open`.
        """
        settings, timeout_s = self._settings, self._config.timeout_s
        client, put_config = make_client(), make_replicate_config(settings)
        connect(client, settings, timeout_s)
        calls = Calls(settings.max_late_calls)
        staging = Staging(settings.buffer_bytes, settings.num_buffers)
        connection = _Connection(
            client=client,
            pages=PageClient(client, put_config, calls, settings.call_timeout_s),
            calls=calls,
            staging=staging,
        )
        try:
            code = calls.run(
                lambda: client.register_buffer(staging.address, staging.num_bytes), timeout_s
            )
        except UnansweredError:
            self._disconnect(connection)
            raise
        if code != Code.OK:
            self._disconnect(connection)
            raise BackendUnavailableError(
                f"Mooncake store: expected to register {staging.num_bytes} bytes of staging with "
                f"{settings.protocol}, got code {code}; lower num_buffers or buffer_bytes, or raise "
                f"the limit of locked memory"
            )
        return connection

    def _require_health(self, connection: _Connection) -> None:
        """The master answers a request.

        Mooncake's own health check said that all is well for seconds after a master was killed.

        Raises:
            BackendUnavailableError: It does not.
        """
        try:
            (code,) = connection.pages.exist([f"{self._settings.namespace}/health"])
        except UnansweredError as error:
            raise BackendUnavailableError(
                f"Mooncake store: expected the mooncake_master at "
                f"{self._settings.master_server_address} to answer, but: {error}",
                transient=True,
            ) from error
        if code < 0:
            raise BackendUnavailableError(
                f"Mooncake store: expected the mooncake_master at "
                f"{self._settings.master_server_address} to look for an object, got code {code}"
            )

    def _disconnect(self, connection: _Connection) -> None:
        """Let go of everything; what does not answer is left to its thread."""
        client, staging = connection.client, connection.staging

        def end() -> None:
            client.unregister_buffer(staging.address)
            client.close()

        connection.calls.close(end, self._settings.call_timeout_s)
