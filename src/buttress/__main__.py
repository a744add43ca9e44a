"""The command line as `python -m buttress`, and with torchrun: torchrun --nproc-per-node 2 -m buttress train ..."""

from buttress.cli import main

if __name__ == "__main__":
    main()
