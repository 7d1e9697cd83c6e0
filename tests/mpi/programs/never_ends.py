"""A rank that waits until somebody kills it."""

import signal

signal.pause()
