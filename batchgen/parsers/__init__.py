"""How models write what is not the answer: their thoughts, and calls of tools. Text only; knows neither rows nor the engine."""
