//! Remembers the last turn of each session that this replica answered, so that the next turn is
//! logged without the prompt that it shares with it.
//!
//! This is only a cache. If the parent was evicted, or another replica answered it, the turn is
//! logged in full.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use event_log::event::{Generation, Prefix};
use event_log::payload;
use uuid::Uuid;

/// Tokens remembered over all sessions: 32 MiB.
const TOKENS_MAX: usize = 8 * 1024 * 1024;

/// Tenant and episode.
type Key = (String, Uuid);

/// A generation that the next turn of its session may share tokens with.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Parent {
    id: Uuid,
    /// Prompt and sampled tokens.
    tokens: Arc<[u32]>,
}

#[derive(Debug, Default)]
pub struct Sessions {
    turns: Mutex<TurnCache>,
}

#[derive(Debug, Default)]
struct TurnCache {
    parents: HashMap<Key, (u64, Parent)>,
    /// Keys by when they were last used.
    order: BTreeMap<u64, Key>,
    used: u64,
    tokens: usize,
}

impl Sessions {
    /// The last turn of a session.
    pub(super) fn parent(&self, tenant: &str, episode: Uuid) -> Option<Parent> {
        let turns = self.turns();
        let (_, parent) = turns.parents.get(&(tenant.to_owned(), episode))?;
        Some(parent.clone())
    }

    /// Remembers a logged turn. Evicts the least recently used sessions.
    pub(super) fn remember(&self, tenant: &str, generation: &Generation, prompt: &[u32]) {
        let key = (tenant.to_owned(), generation.episode_id);
        let tokens: Arc<[u32]> = prompt.iter().chain(&generation.token_ids).copied().collect();
        if tokens.len() > TOKENS_MAX {
            return;
        }
        let mut turns = self.turns();
        turns.evict(&key);
        while turns.tokens + tokens.len() > TOKENS_MAX {
            let Some(oldest) = turns.order.values().next().cloned() else {
                break;
            };
            turns.evict(&oldest);
        }
        turns.used += 1;
        let used = turns.used;
        turns.tokens += tokens.len();
        turns.order.insert(used, key.clone());
        let parent = Parent {
            id: generation.id,
            tokens,
        };
        turns.parents.insert(key, (used, parent));
    }

    fn turns(&self) -> MutexGuard<'_, TurnCache> {
        self.turns.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl TurnCache {
    fn evict(&mut self, key: &Key) {
        if let Some((used, parent)) = self.parents.remove(key) {
            self.order.remove(&used);
            self.tokens -= parent.tokens.len();
        }
    }
}

impl Parent {
    /// Removes the prefix that `generation` shares with this turn from its prompt, if it has at
    /// least `tokens_min` tokens. A shorter prefix costs a reader more than it saves.
    pub(super) fn split_prefix(&self, generation: &mut Generation, tokens_min: usize) {
        let pairs = self.tokens.iter().zip(&generation.prompt_ids);
        let shared = pairs.take_while(|(mine, its)| mine == its).count();
        let Ok(length) = u32::try_from(shared) else { return };
        if shared < tokens_min.max(1) {
            return;
        }
        let rest = generation.prompt_ids.split_off(shared);
        let hash = blake3::hash(&payload::token_bytes(&generation.prompt_ids));
        generation.prompt_ids = rest;
        generation.prompt_prefix = Some(Prefix {
            length,
            hash: *hash.as_bytes(),
        });
        generation.parent_id = Some(self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parent(tokens: &[u32]) -> Parent {
        Parent {
            id: Uuid::from_u128(7),
            tokens: tokens.into(),
        }
    }

    #[test]
    fn only_the_tokens_after_the_shared_prefix_are_logged() {
        let mut generation = crate::api::tests::generation(vec![1, 2, 3, 9, 9]);
        parent(&[1, 2, 3, 4]).split_prefix(&mut generation, 4);
        assert_eq!(
            (generation.parent_id, generation.prompt_ids.len()),
            (None, 5),
            "three are too few"
        );
        parent(&[1, 2, 3, 4]).split_prefix(&mut generation, 3);
        assert_eq!(generation.prompt_ids, [9, 9]);
        assert_eq!(generation.parent_id, Some(Uuid::from_u128(7)));
        let prefix = generation.prompt_prefix.unwrap();
        assert_eq!(prefix.length, 3);
        assert_eq!(prefix.hash, *blake3::hash(&payload::token_bytes(&[1, 2, 3])).as_bytes());
    }

    #[test]
    fn turns_of_several_replicas_and_contexts_are_in_the_order_of_time() {
        let replicas = [Sessions::default(), Sessions::default()];
        let mut prompt = vec![1, 2, 3];
        let mut turns = Vec::new();
        for (replica, is_other_context) in [(0, false), (1, false), (0, false), (0, true), (0, false), (1, false)] {
            let asked = if is_other_context { vec![9, 9] } else { prompt.clone() };
            let mut turn = crate::api::tests::generation(asked.clone());
            (turn.id, turn.episode_id) = (Uuid::now_v7(), Uuid::from_u128(1));
            let sessions: &Sessions = &replicas[replica];
            if let Some(parent) = sessions.parent("a", turn.episode_id) {
                parent.split_prefix(&mut turn, 1);
            }
            sessions.remember("a", &turn, &asked);
            prompt.extend(&turn.token_ids);
            turns.push(turn);
        }
        assert!(turns.iter().any(|turn| turn.parent_id.is_some()));
        // as rewards and credit sort them
        let places = turns.iter().map(|turn| (turn.segment, turn.turn, turn.id));
        assert!(places.is_sorted(), "{turns:?}");
    }

    #[test]
    fn the_least_recently_used_session_is_evicted() {
        let sessions = Sessions::default();
        let half = vec![5; TOKENS_MAX / 2];
        let mut turns = Vec::new();
        for _ in 0..3 {
            let mut generation = crate::api::tests::generation(Vec::new());
            generation.token_ids.clear();
            sessions.remember("a", &generation, &half);
            turns.push(generation);
        }
        let known = |turn: &Generation| sessions.parent("a", turn.episode_id).is_some();
        assert_eq!(turns.iter().map(known).collect::<Vec<_>>(), [false, true, true]);
        assert_eq!(sessions.parent("b", turns[2].episode_id), None, "another tenant's");
    }
}
