"""A program over the package etcd3 0.12.0: a stranger's etcd client at a book.

    PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION=python .venv-etcd3/bin/python etcd3_peer.py HOST:PORT P

A request is a line of JSON on stdin, `{"do": NAME, ...}`, and gets a line back:
`{"did": ...}` or `{"failed": ...}`. What the watch brings comes in between, a line a
revision: `{"saw": [[revision, "put" or "delete", key after P/], ...]}`.

It knows what the top of `storage.proto` says, and nothing of the server's code.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import sys
import threading
from collections.abc import Mapping
from typing import Any

import etcd3

from rankbook import convert, v1

_write_lock = threading.Lock()


def say(line: Mapping[str, Any]) -> None:
    """Prints a line; the watch's thread does, too."""
    with _write_lock:
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


def record_of(engine_id: str, generation: str, pp: int, tp: int, sizes: v1.Layout) -> Any:
    """A record as the book keeps it, with every default in its place."""
    share = sizes.num_layers // sizes.pp_size
    return v1.WorkerRecord(
        namespace="default",
        group="strangers",
        replica=engine_id,
        engine_id=engine_id,
        generation=generation,
        role=v1.ROLE_PRODUCER,
        layout=sizes,
        slot=v1.Slot(pp_rank=pp, tp_rank=tp),
        layers=v1.Layers(start_layer=pp * share, end_layer=(pp + 1) * share),
        handshake=v1.Handshake(format="test", version=1, payload=b"of etcd3"),
        process=v1.Process(boot_id=f"{engine_id}.{generation}.{pp}.{tp}"),
        labels={"zone": "b", "by": "etcd3", "a": "z"},
    )


def digest_of(record: Any) -> bytes:
    """What `WorkerStatus.record_digest` says."""
    return hashlib.sha256(record.SerializeToString(deterministic=True)).digest()


def seal_digest(workers: Mapping[tuple[int, int, int], Any]) -> bytes:
    """What `Seal.digest` says."""
    pieces = b"".join(
        b"%d.%d.%d|%s|%s" % (*slot, stored.holders[-1].boot_id.encode(), stored.record_digest)
        for slot, stored in sorted(workers.items())
    )
    return hashlib.sha256(pieces).digest()


class Read:
    """A book and its liveness keys, all of one revision."""

    def __init__(self, client: Any, prefix: str) -> None:
        get = client.transactions.get
        _, (found, live) = client.transaction(
            compare=[],
            success=[
                get(f"{prefix}/book", f"{prefix}/book0"),
                get(f"{prefix}/live/", f"{prefix}/live0"),
            ],
            failure=[],
        )
        (head, meta), *entries = found
        assert meta.key == f"{prefix}/book".encode(), meta.key
        self.head: bytes = head
        self.book = v1.StoredBook.FromString(head)
        assert self.book.version == 1, self.book.version
        self.revision: int = meta.mod_revision
        self.keys: list[str] = [meta.key.decode() for _, meta in (*found, *live)]
        self.live = {
            meta.key.decode().rpartition("/")[2]: (
                v1.StoredLiveness.FromString(value),
                meta.lease_id,
            )
            for value, meta in live
        }
        self.facts = v1.StoredNamespace()
        self.engines: dict[str, Any] = {}
        self.leases: dict[str, Any] = {}
        self.workers: dict[str, dict[tuple[int, int, int], tuple[Any, int]]] = {}
        for value, meta in entries:
            name = meta.key.decode().removeprefix(f"{prefix}/book/")
            namespace, kind, *rest = name.split("/")
            assert namespace == "default", name
            if kind == "n":
                self.facts = v1.StoredNamespace.FromString(value)
            elif kind == "e":
                self.engines[rest[0]] = v1.StoredEngine.FromString(value)
            elif kind == "l":
                self.leases[rest[0]] = v1.StoredLease.FromString(value)
            elif kind == "w":
                stored = v1.StoredWorker.FromString(value)
                pp, pcp, tp = (int(rank) for rank in rest[1].split("."))
                slots = self.workers.setdefault(rest[0], {})
                slots[pp, pcp, tp] = stored, stored.change_revision or meta.mod_revision
            else:
                raise ValueError(name)

    def joined(self, engine_id: str) -> dict[tuple[int, int, int], tuple[Any, int]]:
        """The workers that count: of the head's start, and of a lease that lives."""
        head = self.engines[engine_id]
        return {
            slot: (stored, revision)
            for slot, (stored, revision) in sorted(self.workers.get(engine_id, {}).items())
            if stored.live
            and stored.epoch == head.epoch
            and not head.evicted
            and stored.lease_id in self.live
        }

    def topology(self, engine_id: str) -> dict[str, Any]:
        """An engine in the words of `rankbook topology -o json`."""
        head, workers = self.engines[engine_id], self.joined(engine_id)
        size = head.layout
        grid = [
            (pp, pcp, tp)
            for pp in range(size.pp_size)
            for pcp in range(size.pcp_size)
            for tp in range(size.tp_size)
        ]
        spans = {slot[0]: stored.record.layers for slot, (stored, _) in workers.items()}
        return {
            "book_id": self.book.book_id,
            "book_revision": self.revision,
            "engine_id": engine_id,
            "group": head.group,
            "replica": head.replica,
            "role": v1.Role.Name(head.role).removeprefix("ROLE_"),
            "generation": head.generation,
            "epoch": head.epoch,
            "layout": convert.to_json(size),
            "present": len(workers),
            "declared": len(grid),
            "missing": [
                dict(zip(("pp_rank", "pcp_rank", "tp_rank"), slot, strict=True))
                for slot in grid
                if slot not in workers
            ],
            "stages": [
                {"pp_rank": pp, "start_layer": span.start_layer, "end_layer": span.end_layer}
                for pp, span in sorted(spans.items())
            ],
            "workers": [convert.to_json(stored.record) for stored, _ in workers.values()],
            "statuses": [
                {
                    "record_digest": base64.b64encode(stored.record_digest).decode(),
                    "revision": revision,
                    "lease_id": stored.lease_id,
                    "asleep": stored.asleep,
                }
                for stored, revision in workers.values()
            ],
        }


class Peer:
    """What may be asked for, a method each."""

    def __init__(self, endpoint: str, prefix: str) -> None:
        host, _, port = endpoint.rpartition(":")
        self._client = etcd3.client(host, int(port), timeout=20)
        self._prefix = prefix
        self._kept: dict[str, threading.Event] = {}
        self._pounding: tuple[threading.Event, threading.Thread] | None = None

    def _read(self) -> Read:
        return Read(self._client, self._prefix)

    def read(self) -> dict[str, Any]:
        """Every key, and each engine joined."""
        read = self._read()
        return {
            "version": read.book.version,
            "revision": read.revision,
            "keys": [key.removeprefix(f"{self._prefix}/") for key in read.keys],
            "engines": {name: read.topology(name) for name in read.engines},
            "leases": {name: lease.ttl_millis for name, lease in read.leases.items()},
            "live": {name: [one.ttl_millis, number] for name, (one, number) in read.live.items()},
            "digests": [
                digest_of(stored.record) == stored.record_digest
                for slots in read.workers.values()
                for stored, _ in slots.values()
                if stored.live
            ],
        }

    def watch(self) -> None:
        """Watches book and leases from now on."""
        revision = self._client.get_response(f"{self._prefix}/book").header.revision

        between_servers = f"{self._prefix}/server/".encode()

        def saw(answer: Any) -> None:
            if isinstance(answer, Exception):
                say({"saw": [[0, "broke", repr(answer)]]})
                return
            say(
                {
                    "saw": [
                        [
                            event.mod_revision,
                            "put" if isinstance(event, etcd3.events.PutEvent) else "delete",
                            event.key.decode().removeprefix(f"{self._prefix}/"),
                        ]
                        for event in answer.events
                        if not event.key.startswith(between_servers)
                    ]
                }
            )

        self._client.add_watch_callback(
            f"{self._prefix}/", saw, range_end=f"{self._prefix}0", start_revision=revision + 1
        )

    def lease(self, lease_id: str) -> dict[str, Any]:
        """The etcd lease that a liveness key hangs on."""
        _, meta = self._client.get(f"{self._prefix}/live/{lease_id}")
        info = self._client.get_lease_info(meta.lease_id)
        return {
            "number": meta.lease_id,
            "granted": info.grantedTTL,
            "left": info.TTL,
            "keys": [key.decode().removeprefix(f"{self._prefix}/") for key in info.keys],
        }

    def revoke(self, engine_id: str) -> None:
        """Ends the etcd leases of an engine's workers, whoever keeps them."""
        read = self._read()
        for stored, _ in read.joined(engine_id).values():
            self._client.revoke_lease(read.live[stored.lease_id][1])

    def publish(
        self,
        engine_id: str,
        generation: str,
        pp_size: int,
        tp_size: int,
        ttl_s: int,
        seal: bool = False,
        revision: int = 0,
    ) -> bool:
        """Publishes a whole engine in one transaction, and keeps its lease alive.

        Args:
            engine_id: The engine.
            generation: The token of its start.
            pp_size: Stages.
            tp_size: Ranks of a stage.
            ttl_s: Of its lease.
            seal: With a seal and the core's record, so that it is READY.
            revision: What is compared with; by default what was read just now.

        Returns:
            Whether it was taken.
        """
        read = self._read()
        before = read.engines.get(engine_id, v1.StoredEngine())
        epoch = max(before.last_epoch, read.facts.epoch_floor) + 1
        lease_id = f"{engine_id}.{generation}.lease"
        sizes = v1.Layout(pp_size=pp_size, tp_size=tp_size, pcp_size=1, dcp_size=1, num_layers=8)
        workers: dict[tuple[int, int, int], Any] = {}
        for pp in range(pp_size):
            for tp in range(tp_size):
                record = record_of(engine_id, generation, pp, tp, sizes)
                holder = v1.StoredHolder(boot_id=record.process.boot_id, sequence=1)
                stored = v1.StoredWorker(
                    version=1,
                    epoch=epoch,
                    live=True,
                    record=record,
                    lease_id=lease_id,
                    record_digest=digest_of(record),
                    holders=[holder],
                )
                stored.change_time.GetCurrentTime()
                workers[pp, 0, tp] = stored
        head = v1.StoredEngine(
            version=1,
            generation=generation,
            epoch=epoch,
            last_epoch=epoch,
            layout=sizes,
            group="strangers",
            replica=engine_id,
            role=v1.ROLE_PRODUCER,
            starts=[*before.starts, v1.StoredStart(generation=generation, epoch=epoch)],
        )
        head.start_time.GetCurrentTime()
        head.change_time.CopyFrom(head.start_time)
        if seal:
            boot_id = f"{engine_id}.{generation}.core"
            head.was_complete = True
            head.seal.number, head.seal.boot_id = 1, boot_id
            head.seal.digest = seal_digest(workers)
            head.seal.time.CopyFrom(head.start_time)
            head.core.live, head.core.lease_id = True, lease_id
            head.core.record.process.boot_id = boot_id
            head.core.holders.add(boot_id=boot_id, sequence=1)
        lease = v1.StoredLease(
            version=1,
            ttl_millis=ttl_s * 1000,
            uses=[v1.StoredUse(engine_id=engine_id, epoch=epoch)],
        )
        liveness = v1.StoredLiveness(version=1, ttl_millis=ttl_s * 1000)
        etcd_lease = self._client.lease(ttl_s)
        book, put = f"{self._prefix}/book", self._client.transactions.put
        taken, _ = self._client.transaction(
            compare=[
                self._client.transactions.value(book) == read.head,
                self._client.transactions.mod(book) == (revision or read.revision),
            ],
            success=[
                put(book, read.head),
                # Before what hangs on it.
                put(f"{book}/default/l/{lease_id}", lease.SerializeToString()),
                put(f"{book}/default/e/{engine_id}", head.SerializeToString()),
                *(
                    put(f"{book}/default/w/{engine_id}/{pp}.{pcp}.{tp}", stored.SerializeToString())
                    for (pp, pcp, tp), stored in workers.items()
                ),
                put(
                    f"{self._prefix}/live/{lease_id}",
                    liveness.SerializeToString(),
                    lease=etcd_lease,
                ),
            ],
            failure=[],
        )
        if not taken:
            etcd_lease.revoke()
            return False
        self._kept[lease_id] = threading.Event()
        threading.Thread(
            target=self._keep, args=(etcd_lease, self._kept[lease_id]), daemon=True
        ).start()
        return True

    def _keep(self, lease: Any, over: threading.Event) -> None:
        while not over.wait(lease.ttl / 3):
            lease.refresh()

    def let_go(self, lease_id: str) -> None:
        """Renews a lease no more."""
        self._kept.pop(lease_id).set()

    def pound(self, engine_id: str, size: int) -> None:
        """Puts the workers of an engine one by one, again and again, each time with
        another payload of so many bytes, and by no rule: no compare, no head."""
        over = threading.Event()
        slots = {
            f"{self._prefix}/book/default/w/{engine_id}/{pp}.{pcp}.{tp}": stored
            for (pp, pcp, tp), (stored, _) in self._read().joined(engine_id).items()
        }

        def put() -> None:
            for number, key in enumerate(itertools.cycle(slots)):
                if over.is_set():
                    return
                stored = slots[key]
                stored.holders[-1].sequence += 1
                stored.record.handshake.payload = b"%08d" % number * (size // 8)
                stored.record_digest = digest_of(stored.record)
                self._client.put(key, stored.SerializeToString())

        thread = threading.Thread(target=put)
        self._pounding = over, thread
        thread.start()

    def rest(self) -> None:
        """Ends that."""
        assert self._pounding is not None
        over, thread = self._pounding
        over.set()
        thread.join()


def main() -> None:
    """Answers until its input ends."""
    peer = Peer(*sys.argv[1:])
    for line in sys.stdin:
        request = json.loads(line)
        try:
            say({"did": getattr(peer, request.pop("do"))(**request)})
        except Exception as error:  # noqa: BLE001 - the test is told
            say({"failed": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
