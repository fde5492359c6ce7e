"""`python -m v100_patches`."""

from v100_patches.cli import main

if __name__ == "__main__":
    main()
