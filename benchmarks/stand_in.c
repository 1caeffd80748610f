// Preloaded into a process, hides from it what a processor has beyond AVX2: AVX-512, AVX-VNNI, AMX. With -DKEEP_AVX512, only what it has
// beyond AVX-512 with bfloat16: AMX, products of float16.
//
// The kernel is asked to let the instruction CPUID fault (arch_prctl, ARCH_SET_CPUID: Intel processors, Linux 4.12 and newer).
// The handler runs it, takes the newer features out of what it says and goes on behind it. So every library that asks the
// processor, by whatever means, sees one with AVX2; what was compiled for newer instructions and does not ask still runs them.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#define ARCH_SET_CPUID 0x1012
#define BIT(n) (1u << (n))

static struct sigaction wanted;  // what is to be done about other faults

typedef void (*handler)(int);

static int install(const struct sigaction *action) {
    int (*real)(int, const struct sigaction *, struct sigaction *) = dlsym(RTLD_NEXT, "sigaction");
    return real(SIGSEGV, action, NULL);
}

// A library's own handler of faults stands behind ours.
int sigaction(int number, const struct sigaction *action, struct sigaction *old) {
    if (number != SIGSEGV) {
        int (*real)(int, const struct sigaction *, struct sigaction *) = dlsym(RTLD_NEXT, "sigaction");
        return real(number, action, old);
    }
    if (old) *old = wanted;
    if (action) wanted = *action;
    return 0;
}

handler signal(int number, handler to) {
    if (number != SIGSEGV) {
        handler (*real)(int, handler) = dlsym(RTLD_NEXT, "signal");
        return real(number, to);
    }
    handler old = wanted.sa_handler;
    memset(&wanted, 0, sizeof wanted);
    wanted.sa_handler = to;
    return old;
}

static void hide(uint32_t leaf, uint32_t part, uint32_t *eax, uint32_t *ebx, uint32_t *ecx, uint32_t *edx) {
    if (leaf == 7 && part == 0) {
        // AVX512_FP16, AMX_BF16, AMX_TILE, AMX_INT8
        *edx &= ~(BIT(22) | BIT(23) | BIT(24) | BIT(25));
#ifndef KEEP_AVX512
        // AVX512F, DQ, IFMA, PF, ER, CD, BW, VL
        *ebx &= ~(BIT(16) | BIT(17) | BIT(21) | BIT(26) | BIT(27) | BIT(28) | BIT(30) | BIT(31));
        // AVX512_VBMI, VBMI2, VNNI, BITALG, VPOPCNTDQ
        *ecx &= ~(BIT(1) | BIT(6) | BIT(11) | BIT(12) | BIT(14));
        // AVX512_4VNNIW, 4FMAPS, VP2INTERSECT
        *edx &= ~(BIT(2) | BIT(3) | BIT(8));
#endif
    } else if (leaf == 7 && part == 1) {
        // AMX_FP16
        *eax &= ~BIT(21);
        // AVX_VNNI_INT8, AVX_NE_CONVERT, AMX_COMPLEX, AVX_VNNI_INT16, AVX10
        *edx &= ~(BIT(4) | BIT(5) | BIT(8) | BIT(10) | BIT(19));
#ifndef KEEP_AVX512
        // AVX_VNNI, AVX512_BF16, AVX_IFMA
        *eax &= ~(BIT(4) | BIT(5) | BIT(23));
#endif
    } else if (leaf == 0x1d || leaf == 0x1e || leaf == 0x24) {  // tiles, their products, AVX10
        *eax = *ebx = *ecx = *edx = 0;
    }
}

static void fault(int number, siginfo_t *info, void *context) {
    (void)number;
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    const uint8_t *at = (const uint8_t *)registers[REG_RIP];
    if (info->si_code != SI_KERNEL || at[0] != 0x0f || at[1] != 0xa2) {  // not CPUID: as without this handler
        install(&wanted);
        return;
    }
    uint32_t leaf = registers[REG_RAX], part = registers[REG_RCX], eax, ebx, ecx, edx;
    syscall(SYS_arch_prctl, ARCH_SET_CPUID, 1);
    __asm__ volatile("cpuid" : "=a"(eax), "=b"(ebx), "=c"(ecx), "=d"(edx) : "a"(leaf), "c"(part));
    syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0);
    hide(leaf, part, &eax, &ebx, &ecx, &edx);
    registers[REG_RAX] = eax, registers[REG_RBX] = ebx, registers[REG_RCX] = ecx, registers[REG_RDX] = edx;
    registers[REG_RIP] += 2;
}

__attribute__((constructor)) static void begin(void) {
    static const char refused[] = "stand_in.c: this processor or kernel does not let CPUID fault\n";
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = fault;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    if (install(&action) || syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0)) {
        if (write(2, refused, sizeof refused - 1) < 0) _exit(71);
        _exit(70);
    }
}
