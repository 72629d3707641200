"""Matrix products of few rows, compiled at installation where there is a compiler."""
