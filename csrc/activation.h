/* Activation functions of gated layers (SiLU, GELU), with the same bits on every instruction set. */
#ifndef SHOAL_ACTIVATION_H
#define SHOAL_ACTIVATION_H

#include <stdint.h>
#include <string.h>

enum activation { NO_ACTIVATION, SILU, GELU_TANH, GELU_ERF };

/* x with a magnitude of at most 87, which it also gives a NaN. By its bits: compilers make several computations, one
   for each case, of what follows a comparison of floats. */
static inline float bounded(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const uint32_t magnitude = bits & 0x7fffffffu, most = 0x42ae0000u; /* 87.0f */
    bits = (bits & 0x80000000u) | (magnitude < most ? magnitude : most);
    memcpy(&x, &bits, sizeof bits);
    return x;
}

/* e^x, for x cut to [-87, 87]: relative error below 2e-7. Polynomial and parts of ln 2 as in Cephes' expf. */
static inline float exponential(float x) {
    x = bounded(x);
    const float shifted = x * 1.44269504f + 12582912.0f; /* has the nearest integer in its lowest bits */
    const float n = shifted - 12582912.0f;
    x = x - n * 0.693359375f;
    x = x - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * x + 1.3981999507e-3f;
    p = p * x + 8.3334519073e-3f;
    p = p * x + 4.1665795894e-2f;
    p = p * x + 1.6666665459e-1f;
    p = p * x + 5.0000001201e-1f;
    p = p * x;
    p = p * x + x;
    p = p + 1.0f;
    uint32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits - 0x4b400000u + 127u) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return p * power;
}

/* x / (1 + e^-x). */
static inline float silu(float x) { return x / (1.0f + exponential(-x)); }

/* x (1 + tanh u) / 2 = x / (1 + e^-2u) with u = sqrt(2 / pi) (x + 0.044715 x^3). */
static inline float gelu_tanh(float x) {
    const float cubic = x * x * x * 0.044715f;
    return x / (1.0f + exponential((x + cubic) * -1.59576912f));
}

/* x times the standard normal distribution function; absolute error below 1e-7 |x| (Abramowitz and Stegun, 7.1.26). */
static inline float gelu_erf(float x) {
    const float z = (x < 0.0f ? -x : x) * 0.707106781f;
    const float t = 1.0f / (1.0f + z * 0.3275911f);
    float p = 1.061405429f;
    p = p * t + -1.453152027f;
    p = p * t + 1.421413741f;
    p = p * t + -0.284496736f;
    p = p * t + 0.254829592f;
    const float tail = p * t * exponential(-(z * z)) * 0.5f;
    return x * (x < 0.0f ? tail : 1.0f - tail);
}

#endif
