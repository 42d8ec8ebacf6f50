"""Interrupts, the lock of a run directory, heartbeats and watchdog; recovery belongs here."""
