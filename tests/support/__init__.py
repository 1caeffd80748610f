"""What tests share: a tiny model, a simulated engine, fake devices, runs of the command."""
