-- Judges, under load: a text that many users write ("ok", "thanks") costs no more than another, and a process that was slow cannot
-- give back what another one works on. The table `judgement` came with the migration before and has few rows, so the new indexes are
-- built in a moment.

-- Which process works on it, as long as `taken_until` says.
alter table judgement add column taken_by uuid;

-- Looking for one of the many rows of a text read them all.
drop index judgement_by_text;
-- What is left to do about a text: whether somebody asks about it, and which copies of it wait for the same answer.
create index judgement_queued on judgement (judge, tenant_id, text_digest, taken_until) where next_at is not null;
-- The cache: any answer of a version.
create index judgement_answered on judgement (tenant_id, judge, text_digest, version) where answer_id is not null;
