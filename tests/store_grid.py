"""Keep records of every row on two processes: see store_processes.py."""

from store_cases import GRID
from store_processes import main

if __name__ == "__main__":
    main(GRID)
