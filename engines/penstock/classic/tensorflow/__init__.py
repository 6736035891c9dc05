"""TensorFlow's SavedModels and GraphDefs, run by TensorFlow or by OpenVINO in the threads of the server."""
