"""The `laconic` command: `main.py`, one file for each subcommand, and the display."""
