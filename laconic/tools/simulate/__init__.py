"""Simulate a training: many workers in one process, with real codecs, schedules and outer steps, on a virtual clock."""
