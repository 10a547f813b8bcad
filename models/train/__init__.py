"""How the tiny model was made: text, tokenizer, training phases and the checks its weights had to pass.

`python -m models.train --help` lists the steps. Nothing here is needed to run a model.
"""
