/* What the programs in this folder share: buffers that must not be overrun, and checks.

   tests/native/test_native_sanitizers.py builds each program once for each instruction set and runs it under sanitizers.
   A program includes the .c files that it tests. Other functions that these call are linked from the built library,
   without sanitizers; tasks of shoal_parallel run one after another. */
#ifndef SHOAL_GUARD_H
#define SHOAL_GUARD_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define CHECK(condition)                                                                                         \
    do {                                                                                                         \
        if (!(condition)) {                                                                                      \
            fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition);                        \
            exit(1);                                                                                             \
        }                                                                                                        \
    } while (0)

/* Kernels may use AMX only after the library, if present, has requested it from the system. */
__attribute__((weak)) int64_t shoal_cpu_features(void);
__attribute__((constructor)) static void ask_for_amx(void) {
    if (shoal_cpu_features) shoal_cpu_features();
}

/* Memory of that many bytes, set to 0xff (NaN in floats), which ends at an inaccessible page.
   It is aligned to what its size is a multiple of, and never freed. */
static inline void *guarded(size_t bytes) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t inner = (bytes + page - 1) / page * page;
    char *start = mmap(NULL, inner + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(start != MAP_FAILED && !mprotect(start + inner, page, PROT_NONE));
    for (size_t i = 0; i < inner; i++) start[i] = (char)0xff;
    return start + inner - bytes;
}

/* Guarded floats in [-1, 1), the same in every run for a seed. */
static inline float *guarded_floats(size_t count, uint32_t seed) {
    float *values = guarded(count * sizeof *values);
    for (size_t i = 0; i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        values[i] = (float)(seed >> 8) / (float)(1 << 23) - 1;
    }
    return values;
}

#endif
