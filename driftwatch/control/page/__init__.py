"""The web page ``/ui``: what control knows, for people. It renders the API's figures and computes none of its own."""
