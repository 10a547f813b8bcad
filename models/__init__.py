"""What the networks are: configuration, weights, forward passes. How they run is `dcpjax`'s business."""
