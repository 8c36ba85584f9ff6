// A training step by hand, on one thread: a perceptron 8-64-64-4 with tanh, batch 32, cross-entropy, SGD with momentum.
#include <math.h>
#include <string.h>

enum { BATCH = 32, IN = 8, WIDTH = 64, OUT = 4 };

static float tangent(float x) {
  x = x > 9 ? 9 : (x < -9 ? -9 : x);
  const float e = expf(2 * x);
  return (e - 1) / (e + 1);
}

// c[m, n] = a[m, k] b[k, n]
static inline void product(const float* a, const float* b, float* c, int m, int k, int n) {
  for (int i = 0; i < m; i++) {
    float* row = c + i * n;
    for (int j = 0; j < n; j++) row[j] = 0;
    for (int p = 0; p < k; p++) {
      const float x = a[i * k + p];
      for (int j = 0; j < n; j++) row[j] += x * b[p * n + j];
    }
  }
}

// c[m, n] = a[m, k] w[n, k]^T
static inline void forward(const float* a, const float* w, float* c, int m, int k, int n) {
  float transposed[WIDTH * WIDTH];
  for (int j = 0; j < n; j++) {
    for (int p = 0; p < k; p++) transposed[p * n + j] = w[j * k + p];
  }
  product(a, transposed, c, m, k, n);
}

// c[m, n] = a[k, m]^T b[k, n]
static inline void outer(const float* a, const float* b, float* c, int m, int k, int n) {
  for (int i = 0; i < m * n; i++) c[i] = 0;
  for (int p = 0; p < k; p++) {
    for (int i = 0; i < m; i++) {
      const float x = a[p * m + i];
      for (int j = 0; j < n; j++) c[i * n + j] += x * b[p * n + j];
    }
  }
}

static inline void update(float* w, float* momentum, const float* gradient, int n, float rate) {
  for (int i = 0; i < n; i++) {
    momentum[i] = .9f * momentum[i] + gradient[i];
    w[i] -= rate * momentum[i];
  }
}

static inline void sum_rows(const float* a, float* sum, int m, int n) {
  for (int j = 0; j < n; j++) sum[j] = 0;
  for (int i = 0; i < m; i++) {
    for (int j = 0; j < n; j++) sum[j] += a[i * n + j];
  }
}

static inline void activate(float* h, const float* bias) {
  for (int i = 0; i < BATCH; i++) {
    for (int j = 0; j < WIDTH; j++) h[i * WIDTH + j] = tangent(h[i * WIDTH + j] + bias[j]);
  }
}

// `w` and `v` are weights and momenta: weight and bias of each layer. Returns the loss.
float step(const float* x, const long* y, float** w, float** v, float rate) {
  float h1[BATCH * WIDTH], h2[BATCH * WIDTH], z[BATCH * OUT], d3[BATCH * OUT], d2[BATCH * WIDTH], d1[BATCH * WIDTH];
  float g[WIDTH * WIDTH], sums[WIDTH], loss = 0;
  forward(x, w[0], h1, BATCH, IN, WIDTH);
  activate(h1, w[1]);
  forward(h1, w[2], h2, BATCH, WIDTH, WIDTH);
  activate(h2, w[3]);
  forward(h2, w[4], z, BATCH, WIDTH, OUT);
  for (int i = 0; i < BATCH; i++) {
    float most = -1e30f, sum = 0, e[OUT];
    for (int j = 0; j < OUT; j++) {
      z[i * OUT + j] += w[5][j];
      most = z[i * OUT + j] > most ? z[i * OUT + j] : most;
    }
    for (int j = 0; j < OUT; j++) sum += e[j] = expf(z[i * OUT + j] - most);
    for (int j = 0; j < OUT; j++) d3[i * OUT + j] = (e[j] / sum - (y[i] == j)) / BATCH;
    loss -= logf(e[y[i]] / sum) / BATCH;
  }
  product(d3, w[4], d2, BATCH, OUT, WIDTH);
  outer(d3, h2, g, OUT, BATCH, WIDTH);
  update(w[4], v[4], g, OUT * WIDTH, rate);
  sum_rows(d3, sums, BATCH, OUT);
  update(w[5], v[5], sums, OUT, rate);
  for (int i = 0; i < BATCH * WIDTH; i++) d2[i] *= 1 - h2[i] * h2[i];
  product(d2, w[2], d1, BATCH, WIDTH, WIDTH);
  outer(d2, h1, g, WIDTH, BATCH, WIDTH);
  update(w[2], v[2], g, WIDTH * WIDTH, rate);
  sum_rows(d2, sums, BATCH, WIDTH);
  update(w[3], v[3], sums, WIDTH, rate);
  for (int i = 0; i < BATCH * WIDTH; i++) d1[i] *= 1 - h1[i] * h1[i];
  outer(d1, x, g, WIDTH, BATCH, IN);
  update(w[0], v[0], g, WIDTH * IN, rate);
  sum_rows(d1, sums, BATCH, WIDTH);
  update(w[1], v[1], sums, WIDTH, rate);
  return loss;
}
