"""torch's own tests of its hooks and averagers, driven with the twin in the place of torch's modules.

    python -m tests.parity            the twin, `laconic.algorithms`
    python -m tests.parity --torch    the control: the very same run with torch's modules

torch ships its tests inside the pip package, in `torch.testing._internal.distributed.distributed_test`.
Nothing of it is copied here: `selection` finds the tests that touch the modules of the twin, `twin` puts the
twin under torch's names before that file is imported, `cpu` lets tests that only place tensors on GPUs run
on CPU and gloo, and `driver` runs each test in a process group of its own, with a time limit.
"""
