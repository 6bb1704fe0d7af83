-- What shaped the distribution that a generation was sampled from beside temperature and top-p: top-k, min-p, penalties, logit
-- bias, and how many ids could be drawn at each token. Few generations have any of it, and nothing asks for one field, so it is
-- one document; null: nothing.
alter table generation add column sampling jsonb;
