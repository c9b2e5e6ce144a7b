"""The shadow: replays drafts on served tokens. The only room that needs torch."""
