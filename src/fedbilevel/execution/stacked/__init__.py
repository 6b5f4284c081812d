"""The fast executor: clients in stacks under `torch.func.vmap`, steps that are traced, tasks recorded on a GPU."""

from fedbilevel.execution.stacked.executor import StackedExecutor

__all__ = ["StackedExecutor"]
