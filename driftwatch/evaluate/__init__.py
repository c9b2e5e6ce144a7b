"""The disciplined before and after of speculation on a sample of requests: four sections and a verdict a segment."""
