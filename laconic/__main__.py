"""`python -m laconic` is the `laconic` command; `torchrun ... -m laconic compare` is one worker of it."""

if __name__ == "__main__":
    from laconic.cli.main import main

    main()
