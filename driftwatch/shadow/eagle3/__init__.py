"""EAGLE-3 drafts (arXiv 2503.01840): one decoder layer that reads three layers of the target, from any trainer."""
