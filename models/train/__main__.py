"""Entry of `python -m models.train`; worker processes import this file too, so it imports nothing heavy."""

if __name__ == "__main__":
    from models.train.train import main

    main()
