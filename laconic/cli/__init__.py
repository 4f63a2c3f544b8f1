"""The `laconic` command: `main.py`, one file for each command, and what they show."""
