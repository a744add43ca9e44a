"""`python -m buttress`, which is also what torchrun starts: torchrun --nproc-per-node 2 -m buttress train ..."""

from buttress.cli import main

if __name__ == "__main__":
    main()
