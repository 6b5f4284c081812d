"""The fast executor: clients in stacks under `torch.func.vmap`.

Steps that run often are traced, and on a GPU whole tasks are captured as CUDA graphs. The parts,
in the order in which a task passes through them:

- `executor`: groups tasks whose clients can be stacked, and cuts groups into chunks.
- `_inputs`, `_samples`, `_pools`, `_feature_cache`: gather the inputs and samples of a chunk.
- `_program`: runs the steps of a chunk, from messages to replies.
- `_batches`: draws the batches.
- `_steps`, `_trace`: measure steps, trace them, and replay traces.
- `_cuda_graphs`: captures and replays whole programs on a GPU.
"""

from fedbilevel.execution.stacked.executor import StackedExecutor

__all__ = ["StackedExecutor"]
