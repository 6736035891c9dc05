// Calls with messages as bytes, so that no generated code is needed: node grpc_js_client.js ADDRESS REQUEST_IN_HEX
const grpc = require("@grpc/grpc-js");

const [address, request] = process.argv.slice(2);
const message = Buffer.from(request, "hex");
const path = "/inference.GRPCInferenceService/";
const same = (bytes) => bytes;
const client = new grpc.Client(address, grpc.credentials.createInsecure());

const unary = (method, options = {}) =>
  new Promise((done) =>
    client.makeUnaryRequest(path + method, same, same, message, new grpc.Metadata(), options, (error) => done(error ? error.code : 0)),
  );

function cancelled() {
  const call = client.makeBidiStreamRequest(path + "ModelStreamInfer", same, same);
  return new Promise((done) => {
    call.on("data", () => {});
    call.on("error", (error) => done(error.code));
    call.write(message);
    setTimeout(() => call.cancel(), 50);
  });
}

function stream(count) {
  const call = client.makeBidiStreamRequest(path + "ModelStreamInfer", same, same);
  let answers = 0;
  return new Promise((done) => {
    call.on("data", () => (answers += 1));
    call.on("error", () => {});
    call.on("status", (status) => done([status.code, answers]));
    for (let index = 0; index < count; index += 1) call.write(message);
    call.end();
  });
}

async function main() {
  const codes = await Promise.all(Array.from({ length: 100 }, () => unary("ModelInfer")));
  console.log("unary", Math.max(...codes), codes.length);
  console.log("unknown", await unary("Nothing"));
  console.log("deadline", await unary("ModelInfer", { deadline: Date.now() - 1 }));
  console.log("cancelled", await cancelled());
  console.log("stream", ...(await stream(20)));
  client.close();
}

main();
