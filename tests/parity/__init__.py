"""Run torch's own tests of its hooks and averagers with the twin instead of torch's modules.

    python -m tests.parity            the twin, `laconic.algorithms`
    python -m tests.parity --torch    the control: the same run with torch's modules

torch ships these tests in its pip package, in `torch.testing._internal.distributed.distributed_test`; none is copied.
`selection` finds the tests that use the modules of the twin, `twin` registers the twin under torch's names before that
file is imported, `cpu` lets tests that only place tensors on GPUs run on CPU with gloo, and `driver` runs each test in
its own processes, with a time limit.
"""
