"""Staying in one piece: interrupts now; watchdogs, health and recovery have their place here."""
