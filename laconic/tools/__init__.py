"""Tools beside training: they launch, compare, plan, measure, simulate and check, through public names of laconic."""
