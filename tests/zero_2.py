"""Train two steps of every other trainer under ZeRO-2, too: see zero.py."""

from zero import SHARED, train_all

STAGES = dict.fromkeys(SHARED, (2,))

if __name__ == "__main__":
    train_all(STAGES)
