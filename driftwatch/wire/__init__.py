"""What engines speak: one module per dialect, used by the tap and by ingest."""
