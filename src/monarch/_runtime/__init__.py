"""Processes, actors' lives, mailboxes, host agents."""
