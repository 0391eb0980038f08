"""Published records of engines that do not run, for real engines to read.

A forged engine is a copy of a real one's records under a name of its own, with
something changed. Nothing but the records stands in: who reads them, and what
becomes of a request that names them, is real. The NIXL agents in them are the real
one's, so where nothing is changed the forged name is as good as the real one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import rankbook
from rankbook.model import (
    CoreRecord,
    Lease,
    Process,
    Role,
    SealedSlot,
    Slot,
    Topology,
    WorkerRecord,
)

Workers = tuple[WorkerRecord, ...]
Change = Callable[[Workers], Workers]
TTL_S = 300.0
"""Life of a forged engine: longer than the tests of a pair take."""


def unchanged(workers: Workers) -> Workers:
    """The real one's records."""
    return workers


def of_another_version(workers: Workers) -> Workers:
    """Another vLLM's, so that the compatibility hash is another."""
    return tuple(
        dataclasses.replace(
            worker,
            compat=dataclasses.replace(
                worker.compat,
                hash="0123abcd",
                factors={**worker.compat.factors, "vllm_version": "0.0.1"},
            ),
        )
        for worker in workers
    )


def with_more_layers(workers: Workers) -> Workers:
    """Of a model with two layers more, which the last stage holds."""
    *others, last = (_of_layout(worker, num_layers=6) for worker in workers)
    return (*others, _of_layers(last, end_layer=6))


def without_layer_0(workers: Workers) -> Workers:
    """With a first stage that begins one layer too late."""
    first, *others = workers
    return (_of_layers(first, start_layer=1), *others)


def with_blocks_of_48(workers: Workers) -> Workers:
    """With KV blocks of 48 tokens."""
    return tuple(
        dataclasses.replace(worker, kv=dataclasses.replace(worker.kv, block_size=48))
        for worker in workers
    )


def of_three_ranks(workers: Workers) -> Workers:
    """With three ranks in each stage, in place of one."""
    return tuple(
        dataclasses.replace(
            _of_layout(worker, tp_size=3), slot=dataclasses.replace(worker.slot, tp_rank=rank)
        )
        for worker in workers
        for rank in range(3)
    )


def consumer_of_two_stages(workers: Workers) -> Workers:
    """A consumer whose four layers are in two stages, in place of one."""
    (worker,) = workers
    return tuple(
        dataclasses.replace(
            _of_layers(_of_layout(worker, pp_size=2), start_layer=2 * pp, end_layer=2 * pp + 2),
            slot=Slot(pp_rank=pp),
            role=Role.CONSUMER,
        )
        for pp in range(2)
    )


def _of_layout(worker: WorkerRecord, **sizes: int) -> WorkerRecord:
    return dataclasses.replace(worker, layout=dataclasses.replace(worker.layout, **sizes))


def _of_layers(worker: WorkerRecord, **borders: int) -> WorkerRecord:
    return dataclasses.replace(
        worker, layers=dataclasses.replace(worker.layers, names=(), **borders)
    )


class Forger:
    """Publishes forged engines, and takes them out again when it is closed."""

    def __init__(self, registry: str) -> None:
        """Connects to the registry at this address."""
        self._client = rankbook.Client(registry)
        self._leases: list[Lease] = []

    def close(self) -> None:
        """Takes out what was published."""
        for lease in self._leases:
            self._client.revoke_lease(lease.lease_id)
        self._client.close()

    def publish(self, engine_id: str, real: str, change: Change = unchanged) -> dict[str, Any]:
        """Publishes a copy of a READY engine, as far as the book takes it.

        Args:
            engine_id: Its name; one that was published before starts anew.
            real: The engine that is copied.
            change: What is changed.

        Returns:
            What a request says of it: remote_engine_id and remote_generation.
        """
        copied = self._client.get_topology(real, wait_s=30)
        generation, boot_id = rankbook.new_id(), rankbook.new_id()
        records = [
            dataclasses.replace(
                worker,
                engine_id=engine_id,
                replica=engine_id,
                generation=generation,
                process=Process(boot_id),
                addresses=(),
                handshake=dataclasses.replace(
                    worker.handshake, payload=_renamed(worker.handshake.payload, engine_id)
                ),
            )
            for worker in change(copied.workers)
        ]
        registered = self._client.register_workers(
            records, sequence=1, lease_key=rankbook.new_id(), ttl_s=TTL_S
        )
        self._leases.append(registered.lease)
        if not self._state_is_invalid(engine_id):
            self._seal(engine_id, generation, records, registered.record_digests, copied)
        return {"remote_engine_id": engine_id, "remote_generation": generation}

    def version_of(self, engine_id: str) -> str:
        """The vLLM of an engine, by its records."""
        first, *_ = self._client.get_topology(engine_id).workers
        return str(first.compat.factors["vllm_version"])

    def _state_is_invalid(self, engine_id: str) -> bool:
        listed = self._client.list_engines(rankbook.EngineFilter(engine_id=engine_id))
        (engine,) = listed.engines
        return engine.state is rankbook.State.INVALID

    def _seal(
        self,
        engine_id: str,
        generation: str,
        records: list[WorkerRecord],
        digests: tuple[bytes, ...],
        copied: Topology,
    ) -> None:
        slots = [
            SealedSlot(record.slot, record.process.boot_id, digest)
            for record, digest in zip(records, digests, strict=True)
        ]
        # Without an address: vLLM takes an engine that listens where another did for its heir.
        core = CoreRecord(
            process=records[0].process,
            connector=copied.engine.core.connector,
            clock=copied.engine.core.clock,
        )
        self._client.seal_engine(engine_id, generation, slots, core)


def _renamed(payload: bytes, engine_id: str) -> bytes:
    """NIXL's metadata of an engine as one of this name would have it."""
    import msgspec

    outer = msgspec.msgpack.decode(payload)
    inner = msgspec.msgpack.decode(outer["agent_metadata_bytes"])
    inner["engine_id"] = engine_id
    outer["agent_metadata_bytes"] = msgspec.msgpack.encode(inner)
    return msgspec.msgpack.encode(outer)
