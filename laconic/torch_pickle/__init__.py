"""Reads a state that torch's own `PowerSGDState` pickled, without unpickling it.

A pickle is a program, and loading one runs whatever its author put in. So nothing here calls `pickle`: the
file's opcodes are read one by one into plain data (`machine`), storages are taken out of torch's containers
with their sizes checked (`container`), and what is left is checked field by field (`state`). Names that the
file mentions are looked up in a table, never imported; nothing in a file can be called.

    state = read_power_sgd_state("checkpoint.pt")
    state.matrix_approximation_rank, state.iter, state.error_dict[0]

Accepted are `pickle.dumps(state)`, `torch.save(state)` and `torch.save({"state": state, ...})`, in torch's
zip format and in the one before it. `UnsafePickleError` says that a file asks for something a saved state does
not need; any other `ValueError` says that it is damaged or not such a file.
"""

from laconic.torch_pickle.machine import UnsafePickleError
from laconic.torch_pickle.state import PickledState, RandomStream, read_power_sgd_state

__all__ = ["PickledState", "RandomStream", "UnsafePickleError", "read_power_sgd_state"]
