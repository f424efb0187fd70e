/* Which request kills the daemons? Several are outstanding when one dies, and at most one of them did it.
 *
 *   the daemon had it and died, SUSPECT_DEATHS times ─► suspect: sent last, and one at a time
 *                            GIVEN_UP_DEATHS times   ─► EIO; so is a READ of the same bytes for a while
 *
 * So the guilty one is soon alone with the deaths, and the others are answered. Deaths before a daemon took over count for
 * nobody, since it was sent nothing; nor do ends that were asked for. */
#include "channel.h"

#include <errno.h>

#define SUSPECT_DEATHS 2
#define GIVEN_UP_DEATHS 5
#define ALONE_S 2.0         /* the next suspect waits so long for the one before */
#define REMEMBERED_S 60.0   /* the kernel reads again by itself what a readahead did not get */

static bool is_suspect(const struct request *r) { return r->deaths >= SUSPECT_DEATHS; }

static void give_up(struct channel *c, struct request *r) {
    say("given up: opcode %u, inode %llu, offset %llu, length %u: %u daemons died while they had it", r->opcode,
        (unsigned long long)r->nodeid, (unsigned long long)r->offset, r->asked, r->deaths);
    count(c, COUNT_GIVEN_UP, 1);
    if (r->opcode == OP_READ) {
        c->given_up[c->given_up_next] = (struct given_up){r->nodeid, r->offset, r->asked, now_s() + REMEMBERED_S};
        c->given_up_next = (c->given_up_next + 1) % GIVEN_UP_MAX;
    }
    r->state = REQUEST_QUEUED;
    request_answer(c, r, -EIO);
}

/* A daemon died by itself that had this request and was expected to answer. True: the request is gone. */
bool suspect_died(struct channel *c, struct request *r) {
    if (r->opcode == OP_INIT) /* without which there is no mount: the grace ends that */
        return false;
    if (++r->deaths == SUSPECT_DEATHS)
        c->suspect_count++;
    if (r->deaths < GIVEN_UP_DEATHS)
        return false;
    give_up(c, r);
    return true;
}

/* The suspect to be sent now, if any: the one with the fewest deaths, and of those the oldest. */
static struct request *next_suspect(struct channel *c) {
    struct request *found = NULL;
    double now = now_s();
    for (struct request *r = c->requests; r; r = r->next) {
        if (!is_suspect(r))
            continue;
        if (r->state == REQUEST_SENT && now - r->sent_s < ALONE_S)
            return NULL;
        if (r->state == REQUEST_QUEUED && (!found || r->deaths < found->deaths))
            found = r;
    }
    return found;
}

/* Whether a flush of all that is queued leaves it to suspects_send. */
bool suspect_held_back(const struct request *r) { return is_suspect(r); }

void suspects_send(struct channel *c) {
    struct request *r = c->suspect_count && c->epoch->ready ? next_suspect(c) : NULL;
    if (r)
        request_send(c, r);
}

void suspect_removed(struct channel *c, const struct request *r) {
    if (!is_suspect(r))
        return;
    c->suspect_count--;
    wake_main(c); /* the next one may go */
}

/* Whether this new request reads what was given up a short while ago. */
bool suspect_known(struct channel *c, const struct request *r) {
    if (r->opcode != OP_READ)
        return false;
    for (unsigned i = 0; i < GIVEN_UP_MAX; i++) {
        const struct given_up *g = &c->given_up[i];
        if (g->until_s > 0 && g->nodeid == r->nodeid && r->offset < g->offset + g->length &&
            g->offset < r->offset + r->asked && now_s() < g->until_s) {
            count(c, COUNT_GIVEN_UP, 1);
            return true;
        }
    }
    return false;
}
