// Checks resources of the Gateway API and of KEDA, JSON on standard input, with the models of @kubernetes-models.
import { readFileSync } from "node:fs";

const packages = {
  "gateway.networking.k8s.io/v1": "@kubernetes-models/gateway-api/gateway.networking.k8s.io/v1",
  "keda.sh/v1alpha1": "@kubernetes-models/keda/keda.sh/v1alpha1",
};

for (const resource of JSON.parse(readFileSync(0, "utf8"))) {
  const models = await import(packages[resource.apiVersion]);
  new models[resource.kind](resource).validate();
}
