"""Settings: one YAML file, each key also as environment variable (``DRIFTWATCH_ENGINE__URL``).

The sections here are the only list of keys: validation, defaults, the command line's errors and the README's table
(:func:`reference`) all derive from them.
"""

from __future__ import annotations

from driftwatch.settings.detection import Baseline, Canary, Detect, Slo, Value
from driftwatch.settings.models import Draft, Governor, HiddenStates, Model, Shadow
from driftwatch.settings.retraining import Answer, Delivery, Gate, Policy, Retrain, TrainingData, Webhook
from driftwatch.settings.serving import Control, Engine, EngineKind, Retention, Sampling, Segment, Store, Tap
from driftwatch.settings.table import leaves, reference
from driftwatch.settings.values import host_port, secret
from driftwatch.settings.whole import Settings, load

__all__ = [
    "Answer",
    "Baseline",
    "Canary",
    "Control",
    "Delivery",
    "Detect",
    "Draft",
    "Engine",
    "EngineKind",
    "Gate",
    "Governor",
    "HiddenStates",
    "Model",
    "Policy",
    "Retention",
    "Retrain",
    "Sampling",
    "Segment",
    "Settings",
    "Shadow",
    "Slo",
    "Store",
    "Tap",
    "TrainingData",
    "Value",
    "Webhook",
    "host_port",
    "leaves",
    "load",
    "reference",
    "secret",
]
