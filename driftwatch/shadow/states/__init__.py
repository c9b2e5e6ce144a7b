"""Hidden states of a target: from a model at hand, or from an engine that serves one too large for this machine."""
