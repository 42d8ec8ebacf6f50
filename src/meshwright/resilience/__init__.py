"""Interrupts; watchdogs, health checks and recovery belong here."""
