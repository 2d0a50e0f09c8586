"""One HTML page of what runs logged and where their time went. Nothing here imports torch."""
