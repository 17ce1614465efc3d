"""Operations, bytes and seconds of layers, stages and collectives, in closed form. No search."""
