"""The demonstration: two replicas, two conversations, one shared store, every answer checked."""

from radixlink.demo._command import DemoOptions, run_demo

__all__ = ["DemoOptions", "run_demo"]
