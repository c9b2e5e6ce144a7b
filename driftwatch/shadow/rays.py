"""Bulk replay on Ray: the same chunks as without it, each replayed by one of a pool of actors, in order.

One task beside the driver reads the files and streams them; actors hold the draft, a GPU each where the cluster has
any. Chunks are cut and come back as :mod:`driftwatch.shadow.history` cuts and gives them, so that every batch, every
sum and every line is the one that a replay without Ray gives. Only what is in flight lies in Ray's object store, and
what comes back holds no tokens and no text.

Ray Data: https://docs.ray.io/en/latest/data/data.html (2.60). Every machine needs driftwatch, and draft and target
under the same path; the files are read by the machine that asks.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from ray.data import ActorPoolStrategy, DataContext, Datasource, ReadTask
from ray.data.block import BlockMetadata
from ray.exceptions import RayError

from driftwatch.errors import DriftwatchError
from driftwatch.records import read_records
from driftwatch.shadow.draft import Draft
from driftwatch.shadow.eagle3.rollout import Cost, Eagle3TreeDraft
from driftwatch.shadow.history import Outcome, chunks, replay_chunk
from driftwatch.shadow.tokenizer import Retokeniser

Open = Callable[[], tuple[Draft, Retokeniser | None]]
"""Opens the draft, and the tokenizer for text; is sent to the actors, each of which calls it once."""

PERSONAL = ("prompt_token_ids", "output_token_ids", "messages", "prompt", "output")
"""Fields of a record that no figure needs once it is replayed."""


class _Chunks(Datasource):
    """The files' records, a block a chunk, by one task: it streams, and waits while nobody takes."""

    def __init__(self, files: Sequence[Path]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._files = [path.resolve() for path in files]

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(self, parallelism: int, *_limits: Any, **_context: Any) -> list[Any]:
        unknown = BlockMetadata(num_rows=None, size_bytes=None, exec_stats=None, input_files=None)
        files = self._files
        return [ReadTask(lambda: _blocks(files), unknown)]


class _Replayer:
    """An actor: one draft, opened once."""

    def __init__(self, opened: Open, batch_tokens: int) -> None:
        self._opened = cache(opened)
        self._batch_tokens = batch_tokens

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        (chunk,) = _rows(batch)
        return {"data": np.array([pickle.dumps(_answered(self._replay, chunk))], object)}

    def _replay(self, chunk: Any) -> tuple[Cost | None, list[Outcome]]:
        if isinstance(chunk, DriftwatchError):
            raise chunk
        draft, tokenizer = self._opened()
        if isinstance(draft, Eagle3TreeDraft):
            draft.cost = Cost()
        outcomes = replay_chunk(draft, chunk, batch_tokens=self._batch_tokens, tokenizer=tokenizer)
        cost = draft.cost if isinstance(draft, Eagle3TreeDraft) else None
        return cost, [_impersonal(one) for one in outcomes]


def replay_files(
    files: Sequence[Path], opened: Open, draft: Draft, *, address: str | None, on_gpu: bool, batch_tokens: int
) -> Iterator[Outcome]:
    """One outcome for each record, in order, without its tokens; what trees cost is added to ``draft``.

    ``address`` is that of a running cluster; without one Ray starts on this machine, for as long as this takes.
    Raises DriftwatchError in one line: what a replay without Ray raises, or what Ray says.
    """
    if missing := next((path for path in files if not path.is_file()), None):
        raise DriftwatchError(f"--ray: {missing} is no file; name files of records that can be read more than once")
    _connect(address)
    try:
        has = ray.cluster_resources()  # type: ignore[no-untyped-call]
        gpu = 1 if on_gpu and has.get("GPU", 0) >= 1 else 0
        pool = ActorPoolStrategy(min_size=1, max_size=max(1, int(has.get("GPU" if gpu else "CPU", 1))))
        here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
        # Reading takes no share of the CPUs: on a machine with a single one the actor would never start.
        read = ray.data.read_datasource(_Chunks(files), num_cpus=0, override_num_blocks=1, label_selector=here)
        replayed = read.map_batches(
            _Replayer,
            batch_size=1,
            compute=pool,
            num_cpus=0 if gpu else 1,
            num_gpus=gpu,
            fn_constructor_args=(opened, batch_tokens),
        )
        failed: DriftwatchError | None = None
        for batch in replayed.iter_batches(batch_size=1, prefetch_batches=0):
            (answer,) = _rows(batch)
            if failed is not None or isinstance(answer, DriftwatchError):
                failed = failed or answer  # said at the end: a run of Ray Data that is left halfway does not end
                continue
            cost, outcomes = answer
            if cost is not None and isinstance(draft, Eagle3TreeDraft):
                draft.cost = Cost(*(a + b for a, b in zip(_counts(draft.cost), _counts(cost), strict=True)))
            yield from outcomes
        if failed is not None:
            raise failed
    except RayError as error:
        raise DriftwatchError(f"--ray: {_first_line(error)}") from None
    finally:
        ray.shutdown()


def _connect(address: str | None) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is told to others unless the user has said so
    for name in ("ray", "ray.data"):
        logging.getLogger(name).setLevel(logging.ERROR)
    local: dict[str, Any] = {"include_dashboard": False} if address is None else {"address": address}
    if address is not None:
        _reach(address)
    try:
        ray.init(configure_logging=False, log_to_driver=False, logging_level=logging.ERROR, **local)
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        where = "on this machine" if address is None else f"at {address}"
        raise DriftwatchError(f"--ray: no Ray {where}: {_first_line(error)}") from None
    context = DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    context.print_on_execution_start = False


def _reach(address: str) -> None:
    """Ray itself waits for minutes where nobody answers."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise DriftwatchError(f"--ray {address}: not an address; write HOST:PORT, or ray://HOST:PORT")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, OverflowError) as error:
        raise DriftwatchError(f"--ray: no Ray at {address}: {error}") from None


def _blocks(files: Sequence[Path]) -> Iterator[Any]:
    """Chunks, and last of all the error that ended them, if one did: an expected one travels as data, since Ray wraps
    what is raised, and logs it at length."""
    try:
        for chunk in chunks(read_records(files)):
            yield _table(chunk)
    except DriftwatchError as error:
        yield _table(DriftwatchError(str(error)))


def _answered(replay: Callable[[Any], Any], chunk: Any) -> Any:
    try:
        return replay(chunk)
    except DriftwatchError as error:
        return DriftwatchError(str(error))


def _table(value: Any) -> Any:
    return pa.table({"data": pa.array([pickle.dumps(value)], pa.large_binary())})


def _rows(batch: dict[str, Any]) -> Iterator[Any]:
    return (pickle.loads(data) for data in batch["data"])


def _impersonal(outcome: Outcome) -> Outcome:
    return replace(outcome, record=outcome.record.model_copy(update=dict.fromkeys(PERSONAL)))


def _counts(cost: Cost) -> list[int]:
    return list(cost.as_dict().values())


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
