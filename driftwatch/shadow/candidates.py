"""Drafts that the settings do not name: candidates, loaded when there is work for them, one at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, MutableMapping
from pathlib import Path

from driftwatch.errors import DriftwatchError, ModelError
from driftwatch.settings import Model, Settings
from driftwatch.shadow.draft import Draft
from driftwatch.shadow.eagle3.tree import Tree, split_spec
from driftwatch.shadow.open import is_named
from driftwatch.store import candidates
from driftwatch.store.connection import Store
from driftwatch.store.work import Task

log = logging.getLogger(__name__)

Load = Callable[[str], Draft]
Key = tuple[str, str]


class Candidates:
    """Puts the candidate that is worked on among the loaded drafts, in place of the one before."""

    def __init__(self, store: Store, settings: Settings, drafts: MutableMapping[Key, Draft]) -> None:
        self._store = store
        self._settings = settings
        self._drafts = drafts
        self._loaded: Key | None = None
        self._refused: set[Key] = set()

    def is_open(self, key: Key, task: Task, load: Load | None) -> bool:
        """Whether the draft of a candidate's task is there to replay; if it cannot be, the store is told why."""
        if key in self._drafts:
            return True
        if key in self._refused or task.candidate is None:
            return False
        try:
            draft = self._load(task, task.candidate, load)
        except DriftwatchError as error:
            log.warning("%s: %s", task.draft, error)
            self._refused.add(key)
            with self._store.write() as session:
                candidates.refuse(session, task.draft, str(error))
            return False
        if self._loaded is not None:
            self._drafts.pop(self._loaded, None)
        self._drafts[key], self._loaded = draft, key
        return True

    def _load(self, task: Task, path: str, load: Load | None) -> Draft:
        """The path came over HTTP to another process: looked at once more, where the files are. An EAGLE-3 head is
        replayed as the tree that the incumbent is."""
        root = self._settings.retrain.candidates_dir
        if root is None or not Path(path).resolve().is_relative_to(root.resolve()):
            raise ModelError(f"candidate {path}: not below `retrain.candidates_dir`")
        if load is None:
            raise ModelError(f"candidate {path}: the shadow has no draft of this model to compare with")
        tree = self._tree(task)
        return load(path if tree is None else f"{path}:{tree}")

    def _tree(self, task: Task) -> Tree | None:
        model = self._settings.model_for(task.model) or Model()
        found = (draft.path for draft in model.drafts if draft.name == task.incumbent and draft.path is not None)
        return next((split_spec(path)[1] for path in found if not is_named(path)), None)
